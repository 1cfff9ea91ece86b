"""The forms in which the per-example gradient of one weight can be held.

A rule turns what was recorded of a layer into one form per weight. A form knows each
example's squared norm and the sum of the examples' gradients scaled by given factors,
and tries not to build the gradient of every example to get there.

All tensors have the batch as their first axis; norms and sums are float32.
"""

import abc

import tensorflow as tf

# Float32 products of Gram matrices are off by at most about 1e-6 of |a_s| |a_t| |g_s| |g_t|
# (measured, with and without oneDNN and XLA, for vectors of up to 4,096 entries).
GRAM_ROUNDING = 2e-6
# What squares may lose where they fall below the smallest float32: 1e-38 for each entry.
UNDERFLOW = 1e-30


def gram_norms(gram_a, gram_g):
    """An upper bound, tight to rounding, of |sum_t a_t g_t^T|^2 from two Gram matrices.

    The sum of gram_a * gram_g is exact on paper, but where the positions cancel it is a small
    difference of large numbers. Rounding must not make a large gradient look small: then it
    would not be clipped. So what rounding can hide, GRAM_ROUNDING (sum_t |a_t| |g_t|)^2, is
    added. That also keeps the terms of the clipped sum within what float32 can add up.

    Args:
      gram_a, gram_g: float32 ``[..., T, T]``.

    Returns:
      float32 ``[...]``.
    """
    squares_a, squares_g = tf.linalg.diag_part(gram_a), tf.linalg.diag_part(gram_g)
    sizes = tf.reduce_sum(tf.sqrt(squares_a) * tf.sqrt(squares_g), -1)
    lost = tf.reduce_sum(squares_a + squares_g, -1) * tf.cast(tf.shape(gram_a)[-1], tf.float32)
    norms = tf.maximum(tf.reduce_sum(gram_a * gram_g, [-2, -1]), 0.0)
    return norms + GRAM_ROUNDING * tf.square(sizes) + UNDERFLOW * lost


class Form(abc.ABC):
    """Per-example gradients of one weight of shape ``shape``."""

    shape: tuple

    @abc.abstractmethod
    def squared_norms(self):
        """Float32 ``[batch]``: each example's squared gradient norm."""

    @abc.abstractmethod
    def tensors(self):
        """What ``weighted_sum`` reads; fixed once ``squared_norms`` was called."""

    @abc.abstractmethod
    def weighted_sum(self, factors, tensors):
        """Sum over the batch of factor times gradient, float32, of the weight's shape.

        ``tensors`` are those of :meth:`tensors` with the rows of non-finite examples zeroed.
        """

    @abc.abstractmethod
    def per_example(self):
        """The gradients themselves, float32 ``[batch, *shape]``."""

    def grouped(self, count):
        """The form with ``count`` consecutive rows joined into one example.

        Args:
          count: int or scalar tensor.
        """
        values = tf.reshape(self.per_example(), tf.stack([-1, count, *self.shape]))
        return PerExample(tf.reduce_sum(values, 1), self.shape)


class PerExample(Form):
    """The gradient of every example, ``[batch, *shape]``: for small weights."""

    def __init__(self, values, shape):
        self.shape = tuple(shape)
        self.values = tf.cast(values, tf.float32)

    def squared_norms(self):
        """Sum of squares over everything but the batch."""
        return tf.reduce_sum(tf.square(_flat(self.values)), 1)

    def tensors(self):
        """The gradients."""
        return [self.values]

    def weighted_sum(self, factors, tensors):
        """One vector-matrix product."""
        summed = tf.linalg.matvec(_flat(tensors[0]), factors, transpose_a=True)
        return tf.reshape(summed, self.shape)

    def per_example(self):
        """The gradients."""
        return tf.reshape(self.values, (-1, *self.shape))


class Product(Form):
    """A weight that multiplies its input at T positions: the gradient is sum_t a_t g_t^T.

    Two exact ways to the norm (Goodfellow 2015, arXiv 1510.01799; Li et al. 2021, arXiv
    2110.05679; Bu et al. 2022, arXiv 2210.00038): the gradient itself, of S T D P
    multiplications and S D P numbers an example; or the "ghost" product of the two T x T
    Gram matrices of a and g, of S T^2 (D + P). At one position it is |a|^2 |g|^2.

    Args:
      a: ``[batch, S, T, D]``, the input; S counts blocks with weights of their own.
      g: ``[batch, S, T, P]``, the gradient of the output.
      to_weight: function from ``[..., S, D, P]`` to ``[..., *shape]``.
      shape: the weight's shape.
    """

    def __init__(self, a, g, to_weight, shape):
        self.a, self.g = tf.cast(a, tf.float32), tf.cast(g, tf.float32)
        self.to_weight, self.shape = to_weight, tuple(shape)
        self.gradient = None

    def squared_norms(self):
        """By the cheaper of the two ways, from the static shapes."""
        if self.a.shape[2] == 1:
            over_a = tf.reduce_sum(tf.square(self.a), [2, 3]) + UNDERFLOW
            over_g = tf.reduce_sum(tf.square(self.g), [2, 3]) + UNDERFLOW
            return tf.reduce_sum(over_a * over_g, 1)
        if self._ghost_is_cheaper():
            gram_a = tf.matmul(self.a, self.a, transpose_b=True)
            gram_g = tf.matmul(self.g, self.g, transpose_b=True)
            return tf.reduce_sum(gram_norms(gram_a, gram_g), 1)
        self.gradient = tf.matmul(self.a, self.g, transpose_a=True)
        return tf.reduce_sum(tf.square(self.gradient), [1, 2, 3])

    def _ghost_is_cheaper(self):
        positions, depth, width = self.a.shape[2], self.a.shape[3], self.g.shape[3]
        if None in (positions, depth, width):
            return True  # the memory of the other way is not known to be bounded
        work = positions * (depth + width) < depth * width
        memory = 2 * positions * positions < depth * width
        return work and memory

    def tensors(self):
        """The per-example gradient if it was made, else both factors."""
        return [self.a, self.g] if self.gradient is None else [self.gradient]

    def weighted_sum(self, factors, tensors):
        """The ordinary weight gradient of scaled output gradients, or a contraction."""
        if self.gradient is not None:
            return self.to_weight(tf.einsum("bsdp,b->sdp", tensors[0], factors))
        a, g = tensors
        g = g * factors[:, None, None, None]
        blocks, depth, width = a.shape[1], a.shape[3], g.shape[3]
        if blocks == 1:
            total = tf.matmul(
                tf.reshape(a, [-1, depth]), tf.reshape(g, [-1, width]), transpose_a=True
            )[None]
        else:
            total = tf.einsum("bstd,bstp->sdp", a, g)
        return self.to_weight(total)

    def grouped(self, count):
        """The rows' positions one after another."""
        return Product(_joined(self.a, count), _joined(self.g, count), self.to_weight, self.shape)

    def per_example(self):
        """The matrix product of each example."""
        if self.gradient is None:
            return self.to_weight(tf.matmul(self.a, self.g, transpose_a=True))
        return self.to_weight(self.gradient)


class Rows(Form):
    """A table of which each example reads T rows: the gradient adds g_t to row id_t.

    The norm is that of the summed rows: sum over positions s, t with the same id of
    g_s . g_t. Nothing of size batch x table is built.

    Args:
      ids: int ``[batch, T]``.
      g: ``[batch, T, D]``.
      shape: ``(rows, D)``.
    """

    def __init__(self, ids, g, shape):
        self.ids, self.g = ids, tf.cast(g, tf.float32)
        self.shape = tuple(shape)

    def squared_norms(self):
        """The Gram matrix of g where the ids agree."""
        if self.g.shape[1] == 1:
            return tf.reduce_sum(tf.square(self.g), [1, 2])
        same = tf.cast(self.ids[:, :, None] == self.ids[:, None, :], tf.float32)
        gram = tf.matmul(self.g, self.g, transpose_b=True)
        lengths = tf.sqrt(tf.linalg.diag_part(gram))
        hidden = tf.reduce_sum(same * lengths[:, :, None] * lengths[:, None, :], [1, 2])
        return tf.maximum(tf.reduce_sum(same * gram, [1, 2]), 0.0) + GRAM_ROUNDING * hidden

    def tensors(self):
        """The gradients of the rows read."""
        return [self.g]

    def weighted_sum(self, factors, tensors):
        """A segment sum over all positions of all examples."""
        g = tensors[0] * factors[:, None, None]
        return tf.math.unsorted_segment_sum(
            tf.reshape(g, [-1, self.shape[1]]), tf.reshape(self.ids, [-1]), self.shape[0]
        )

    def grouped(self, count):
        """The rows' positions one after another."""
        ids, g = self.ids[:, None, :, None], self.g[:, None]
        return Rows(_joined(ids, count)[:, 0, :, 0], _joined(g, count)[:, 0], self.shape)

    def per_example(self):
        """The whole table for every example: only for a table that is also used otherwise."""
        batch = tf.shape(self.g)[0]
        ids = self.ids + tf.cast(tf.range(batch)[:, None] * self.shape[0], self.ids.dtype)
        tables = tf.math.unsorted_segment_sum(
            tf.reshape(self.g, [-1, self.shape[1]]), tf.reshape(ids, [-1]), batch * self.shape[0]
        )
        return tf.reshape(tables, (-1, *self.shape))


def merge(forms):
    """One form for a weight that was used several times: the gradients of the uses add.

    The norm of the sum is not the sum of the norms, so uses are joined before any norm is
    taken: along T where the form allows it, else as the gradients themselves.
    """
    if len(forms) == 1:
        return forms[0]
    first = forms[0]
    if all(type(f) is Product for f in forms):
        a = tf.concat([f.a for f in forms], 2)
        g = tf.concat([f.g for f in forms], 2)
        return Product(a, g, first.to_weight, first.shape)
    if all(type(f) is Rows for f in forms):
        ids = tf.concat([f.ids for f in forms], 1)
        return Rows(ids, tf.concat([f.g for f in forms], 1), first.shape)
    return PerExample(tf.add_n([f.per_example() for f in forms]), first.shape)


def zero_rows(forms, finite):
    """Each form's tensors with the rows of non-finite examples zeroed, decided in the graph.

    Such rows are rare, and passing over every activation is not free, so it is done only
    when there is one.
    """
    tensors = [f.tensors() for f in forms]
    flat = tf.nest.flatten(tensors)

    def zeroed():
        return [
            tf.where(tf.reshape(finite, [-1] + [1] * (t.shape.rank - 1)), t, tf.zeros_like(t))
            for t in flat
        ]

    cleaned = tf.cond(tf.reduce_all(finite), lambda: [tf.identity(t) for t in flat], zeroed)
    return tf.nest.pack_sequence_as(tensors, tf.nest.flatten(cleaned))


def _joined(tensor, count):
    """``[batch * count, S, T, D]`` -> ``[batch, S, count * T, D]``."""
    blocks, positions, depth = tensor.shape[1:]
    if positions is None:
        positions = tf.shape(tensor)[2]
    batch = tensor.shape[0]
    known = isinstance(count, int) and isinstance(positions, int)
    tensor = tf.reshape(tensor, tf.stack([-1, count, blocks, positions, depth]))
    tensor = tf.transpose(tensor, [0, 2, 1, 3, 4])
    tensor = tf.reshape(tensor, tf.stack([-1, blocks, count * positions, depth]))
    rows = batch // count if isinstance(batch, int) and isinstance(count, int) else None
    tensor.set_shape([rows, blocks, count * positions if known else None, depth])
    return tensor


def _flat(values):
    return tf.reshape(values, [tf.shape(values)[0], -1])
