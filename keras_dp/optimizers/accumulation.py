"""Logical batches that arrive in several parts: clipped sums add up, without noise, until the last.

What is added up here is not private. It is released only as the total of a logical batch, to
which the optimizer adds noise once. So it lives in variables that no checkpoint, weights file or
saved model ever sees; a run that is resumed begins its logical batch anew. The parts that were
dropped were never released and cost nothing.
"""

import tensorflow as tf

_NONE = -1  # no draw has this number


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
            self._draw = tf.Variable(_NONE, dtype=tf.int64, trainable=False, name="draw")
            for v in self._variables:
                zeros = tf.zeros(v.shape, tf.float32)
                self._sums[id(v)] = tf.Variable(zeros, trainable=False, name="clipped_sum")

    def next_part(self, parts):
        """Counts one of ``parts`` equal parts of a logical batch.

        Returns:
          ``(first, last)``, scalar bool tensors.
        """
        before = self._parts.read_value()
        last = before + 1 >= parts
        self._parts.assign(tf.where(last, tf.constant(0, tf.int64), before + 1))
        return before == 0, last

    def next_piece(self, draw, last):
        """The same for a piece of a draw: the first is the one whose draw has another number.

        So a draw that was left unfinished is dropped.

        Args:
          draw: int64 scalar, the number of the draw.
          last: bool scalar, whether the draw is complete with this piece.
        """
        first = self._draw.read_value() != draw
        self._draw.assign(tf.where(last, tf.constant(_NONE, tf.int64), draw))
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
