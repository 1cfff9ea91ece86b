"""Logical batches that arrive in several parts: clipped sums add up, without noise, until the last.

What is added up here is not private. It is released only as the total of a logical batch, to
which the optimizer adds noise once. So it lives in variables that no checkpoint, weights file or
saved model ever sees; a run that is resumed begins its logical batch anew. The parts that were
dropped were never released and cost nothing.
"""

import tensorflow as tf

_NONE = -1  # no draw has this number, and no piece this position


class Accumulator:
    """Sums of the parts of a logical batch that have arrived so far.

    Not trackable and not copyable on purpose: a copy begins a logical batch of its own.
    """

    def __init__(self):
        self._sums = {}  # by the identity of the variable whose gradient it is
        self._variables = None  # kept, so that an identity stays that of one variable

    @property
    def built(self):
        """Whether the variables are there."""
        return self._variables is not None

    def build(self, variables):
        """Makes a float32 sum for each of the trained variables, and the counters.

        Args:
          variables: all that will ever be updated; some may be frozen later.
        """
        self._variables = list(variables)
        with tf.init_scope():
            self._parts = tf.Variable(0, dtype=tf.int64, trainable=False, name="parts")
            self._expected = tf.Variable(0, dtype=tf.int64, trainable=False, name="position")
            self._draw = tf.Variable(_NONE, dtype=tf.int64, trainable=False, name="draw")
            for v in self._variables:
                zeros = tf.zeros(v.shape, tf.float32)
                self._sums[id(v)] = tf.Variable(zeros, trainable=False, name="clipped_sum")

    @property
    def variables(self):
        """list of tf.Variable: the sums and the counters, once they are built."""
        if not self.built:
            return []
        return [self._parts, self._expected, self._draw, *self._sums.values()]

    @property
    def waiting(self):
        """int, parts of a logical batch that have arrived and wait for the others."""
        return int(self._parts.numpy()) if self.built else 0

    def begin(self):
        """Drops the parts that wait: the next one is a first one. A piece knows its own draw."""
        if self.built:
            self._parts.assign(0)

    def next_part(self, parts):
        """Counts one of ``parts`` equal parts of a logical batch.

        Returns:
          ``(first, last)``, scalar bool tensors.
        """
        before = self._parts.read_value()
        last = before + 1 >= parts
        self._parts.assign(tf.where(last, tf.constant(0, tf.int64), before + 1))
        return before == 0, last

    def next_piece(self, piece):
        """The same for a :class:`~keras_dp.pieces.Piece` of a draw.

        The first is one at position 0, or of another draw: what is left of a draw that was never
        finished is dropped. A draw of which a piece is missing has no last one: what would be
        released is not a sample of the law that is accounted.
        """
        draw, last = piece.draw[0], piece.last[0]
        none = tf.constant(_NONE, tf.int64)
        first = self._draw.read_value() != draw
        self._draw.assign(tf.where(last, none, draw))
        if piece.position is not None:
            position = piece.position[0]
            first |= position == 0
            expected = tf.where(first, tf.zeros_like(draw), self._expected.read_value())
            all_there = position == expected
            self._expected.assign(tf.where(all_there, position + 1, none))
            last &= all_there
        return first, last

    def totals(self, sums, variables, first):
        """The sums of this part and of those before it in the same logical batch.

        Args:
          sums: float32 tensors, one for each of ``variables``.
          variables: those that are trained now.
          first: scalar bool tensor; what is left of an earlier logical batch does not count.

        Returns:
          A list of totals for all variables, also for those that are frozen now.
        """
        arrived = {id(v): s for v, s in zip(variables, sums)}
        unknown = [v.path for v in variables if id(v) not in self._sums]
        if unknown:
            raise ValueError(
                f"The optimizer was built without the variables {unknown}, which are trained now. "
                "Compile the model with a new optimizer after layers were made trainable."
            )
        new = [arrived.get(id(v)) for v in self._variables]
        new = [tf.zeros(v.shape) if n is None else n for v, n in zip(self._variables, new)]

        def added():
            return [self._sums[id(v)] + n for v, n in zip(self._variables, new)]

        return tf.cond(first, lambda: [tf.identity(n) for n in new], added)

    def keep(self, totals):
        """Waits with ``totals`` for the next part."""
        for v, total in zip(self._variables, totals):
            self._sums[id(v)].assign(total)

    def of(self, totals, variables):
        """Those of ``totals`` that belong to ``variables``."""
        by_variable = {id(v): total for v, total in zip(self._variables, totals)}
        return [by_variable[id(v)] for v in variables]

    def __deepcopy__(self, memo):
        return Accumulator()

    def __reduce__(self):
        return Accumulator, ()

    def __repr__(self):
        return "<Accumulator>"
