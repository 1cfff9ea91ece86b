"""The forms in which the per-example gradient of one weight can be held.

A rule turns what was recorded of a layer into one form per weight. A form knows each
example's squared norm and the sum of the examples' gradients scaled by given factors,
and tries not to build the gradient of every example to get there.

All tensors have the batch as their first axis; norms and sums are float32.
"""

import abc
import copy
import dataclasses
import math

import tensorflow as tf

from keras_dp.clipping import shapes

# Float32 products of Gram matrices are off by at most about 1e-6 of |a_s| |a_t| |g_s| |g_t|
# (measured, with and without oneDNN and XLA, for vectors of up to 4,096 entries).
GRAM_ROUNDING = 2e-6
# What squares may lose where they fall below the smallest float32: 1e-38 for each entry.
UNDERFLOW = 1e-30

# Costs in multiplications, fitted to convolutions and dense layers of 32 to 256 examples on two
# AVX-512 cores (docs/engine.md): to write a number and read it twice, and to call a small product.
_TOUCH = 55
_CALL = 300_000

# Per-example gradients of up to this many numbers are put together before anything is done.
_SMALL = 1 << 14


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
    # The first version of the operation: tf.linalg.diag_part makes a trace twice as long.
    squares_a = tf.raw_ops.MatrixDiagPart(input=gram_a)
    squares_g = tf.raw_ops.MatrixDiagPart(input=gram_g)
    sizes = tf.reduce_sum(tf.sqrt(squares_a * squares_g), -1)
    positions = gram_a.shape[-1] or tf.cast(tf.shape(gram_a)[-1], tf.float32)
    lost = tf.reduce_sum(squares_a + squares_g, -1) * (UNDERFLOW * positions)
    norms = tf.maximum(tf.reduce_sum(gram_a * gram_g, [-2, -1]), 0.0)
    return norms + GRAM_ROUNDING * tf.square(sizes) + lost


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a product ``[S, D, P]`` lies in a weight: split, permuted, and reshaped to its shape.

    Uses of a weight whose layouts are equal can be joined along T.

    Attributes:
      sizes: what S, D and P are split into, one after the other.
      axes: for each axis of the result, which of those sizes it is.
    """

    sizes: tuple = ()
    axes: tuple = ()

    def place(self, product, shape):
        """``[S, D, P]`` -> ``shape``; or both with a batch before them."""
        if self.axes == tuple(sorted(self.axes)):
            return shapes.last(product, 3, shape)
        product = shapes.last(product, 3, self.sizes)
        lead = product.shape.rank - len(self.sizes)
        product = tf.transpose(product, [*range(lead), *(lead + axis for axis in self.axes)])
        return shapes.last(product, len(self.axes), shape)


IN_ORDER = Layout()


def blocks_between(blocks, depth, width):
    """The layout ``[D, S, P]``: the columns of a kernel are split into S blocks."""
    if blocks == 1:
        return IN_ORDER
    return Layout((blocks, depth, width), (1, 0, 2))


class Form(abc.ABC):
    """Per-example gradients of one weight of shape ``shape``."""

    shape: tuple
    makes_much = False  # whether the way to the norms takes room, above what the form holds

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
        self.size = math.prod(self.shape)

    def squared_norms(self):
        """Sum of squares over everything but the batch."""
        return tf.reduce_sum(tf.square(shapes.flat(self.values)), 1)

    def tensors(self):
        """The gradients."""
        return [self.values]

    def weighted_sum(self, factors, tensors):
        """One vector-matrix product."""
        summed = tf.matmul(tf.expand_dims(factors, 0), shapes.flat(tensors[0]))
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
      shape: the weight's shape.
      layout: the :class:`Layout` of ``[S, D, P]`` in it. By default the numbers keep their order.
    """

    def __init__(self, a, g, shape, layout=IN_ORDER):
        self.a, self.g = tf.cast(a, tf.float32), tf.cast(g, tf.float32)
        self.shape, self.layout = tuple(shape), layout
        self.gradient = None
        self._swapped = self.a.shape[3] > self.g.shape[3]

    @classmethod
    def of_examples(cls, parts):
        """One product of those of several parts of a batch, whose gradients were made."""
        gradient = tf.concat([part.gradient for part in parts], 0)
        whole = copy.copy(parts[0])
        whole.a = whole.g = None  # what the gradients were made of is not kept
        whole.gradient = gradient
        return whole

    def squared_norms(self):
        """By the cheaper of the two ways, from the static shapes."""
        if self.a.shape[2] == 1 or self.ghost_is_cheaper():
            return self.ghost_norms()
        self.gradient = self._gradient()
        return tf.reduce_sum(tf.square(self.gradient), [1, 2, 3])

    def _gradient(self):
        """``[batch, S, D, P]``, or with the last two swapped: long rows are the faster ones."""
        if self._swapped:
            return tf.matmul(self.g, self.a, transpose_a=True)
        return tf.matmul(self.a, self.g, transpose_a=True)

    def ghost_norms(self):
        """By the Gram matrices; with a single position these are numbers."""
        if self.a.shape[2] == 1:
            over_a = tf.reduce_sum(tf.square(self.a), [2, 3]) + UNDERFLOW
            over_g = tf.reduce_sum(tf.square(self.g), [2, 3]) + UNDERFLOW
            return tf.reduce_sum(over_a * over_g, 1)
        gram_a = tf.matmul(self.a, self.a, transpose_b=True)
        gram_g = tf.matmul(self.g, self.g, transpose_b=True)
        return tf.reduce_sum(gram_norms(gram_a, gram_g), 1)

    def ghost_is_cheaper(self):
        """Whether the Gram matrices are: by time, and by memory where the times are close."""
        positions, depth, width = self.a.shape[2], self.a.shape[3], self.g.shape[3]
        if None in (positions, depth, width):
            return True  # the memory of the other way is not known to be bounded
        sum_of_gradients = positions * depth * width  # made later by the one, kept by the other
        ghost = positions**2 * (depth + width) + sum_of_gradients + 2 * _CALL
        explicit = sum_of_gradients + _TOUCH * depth * width + _CALL
        if depth * width > 2 * positions * (depth + width):
            ghost *= 0.85
        return ghost <= explicit

    @property
    def way(self):
        """How the norms are found, for people; known once ``squared_norms`` was called."""
        if self.gradient is not None:
            return "gradient of each example"
        return "two lengths" if self.a.shape[2] == 1 else "Gram matrices"

    def tensors(self):
        """The per-example gradient if it was made, else both factors."""
        return [self.a, self.g] if self.gradient is None else [self.gradient]

    def weighted_sum(self, factors, tensors):
        """The ordinary weight gradient of scaled output gradients, or a contraction."""
        if self.gradient is not None:
            total = tf.matmul(tf.expand_dims(factors, 0), shapes.flat(tensors[0]))
            total = self._in_order(tf.reshape(total, self.gradient.shape[1:]))
            return self.layout.place(total, self.shape)
        a, g = tensors
        blocks, depth, width = a.shape[1], a.shape[3], g.shape[3]
        if depth < width:  # scaling costs memory traffic
            a *= shapes.rows(factors, 1, 1, 1)
        else:
            g *= shapes.rows(factors, 1, 1, 1)
        if blocks == 1:
            total = tf.matmul(
                tf.reshape(a, [-1, depth]), tf.reshape(g, [-1, width]), transpose_a=True
            )
            total = tf.expand_dims(total, 0)
        else:
            total = tf.einsum("bstd,bstp->sdp", a, g)
        return self.layout.place(total, self.shape)

    def _in_order(self, gradient):
        return tf.linalg.matrix_transpose(gradient) if self._swapped else gradient

    def grouped(self, count):
        """The rows' positions one after another."""
        return Product(_joined(self.a, count), _joined(self.g, count), self.shape, self.layout)

    def per_example(self):
        """The matrix product of each example."""
        gradient = self._gradient() if self.gradient is None else self.gradient
        return self.layout.place(self._in_order(gradient), self.shape)


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


class Tied(Form):
    """A table that is both read by rows and multiplied by: the gradient is F + G.

    F is that of the :class:`Rows` (id_s, e_s), G that of the :class:`Product` (a_t, g_t), with
    the table's rows along a. |F + G|^2 = |F|^2 + |G|^2 + 2 <F, G>, and <F, G> is the sum over
    s, t of a_t[id_s] (e_s . g_t): entries of a are gathered, and no table is built.

    The two uses may almost cancel. So what rounding can hide is added, as in ``gram_norms``.

    Args:
      rows: the :class:`Rows` of a table ``[V, D]``.
      product: a :class:`Product` with a ``[batch, 1, T, V]`` and g ``[batch, 1, T, D]``.
    """

    def __init__(self, rows, product):
        self.rows, self.product, self.shape = rows, product, rows.shape

    def squared_norms(self):
        """Both squares and twice the inner product."""
        a, g, e = self.product.a[:, 0], self.product.g[:, 0], self.rows.g
        at_ids = tf.gather(a, self.rows.ids, axis=2, batch_dims=1)
        inner = tf.reduce_sum(at_ids * tf.matmul(g, e, transpose_b=True), [1, 2])
        sizes = tf.norm(g, axis=2)[:, :, None] * tf.norm(e, axis=2)[:, None, :]
        hidden = tf.reduce_sum(tf.abs(at_ids) * sizes, [1, 2])
        squares = self.rows.squared_norms() + self.product.ghost_norms()
        return tf.maximum(squares + 2 * inner, 0.0) + GRAM_ROUNDING * (squares + 2 * hidden)

    def tensors(self):
        """The gradients of the rows read, and both factors."""
        return [*self.rows.tensors(), *self.product.tensors()]

    def weighted_sum(self, factors, tensors):
        """The sums of both uses."""
        from_rows = self.rows.weighted_sum(factors, tensors[:1])
        return from_rows + self.product.weighted_sum(factors, tensors[1:])

    def grouped(self, count):
        """Both uses grouped."""
        return Tied(self.rows.grouped(count), self.product.grouped(count))

    def per_example(self):
        """The whole table for every example."""
        return self.rows.per_example() + self.product.per_example()


def merge(forms):
    """One form for a weight that was used several times: the gradients of the uses add.

    The norm of the sum is not the sum of the norms, so uses are joined before any norm is
    taken: along T where the forms allow it, rows and a product by :class:`Tied`, else as the
    gradients themselves.
    """
    if len(forms) == 1:
        return forms[0]
    rows = [f for f in forms if type(f) is Rows]
    products = [f for f in forms if type(f) is Product]
    layouts = {f.layout for f in products}
    if len(rows) + len(products) == len(forms) and len(layouts) <= 1:
        if not products:
            return _one_after_another(rows)
        product = _beside_each_other(products)
        if not rows:
            return product
        if layouts == {IN_ORDER} and not _has_many_positions(product):
            return Tied(_one_after_another(rows), product)
    return PerExample(tf.add_n([f.per_example() for f in forms]), forms[0].shape)


def _has_many_positions(product):
    """Whether a whole weight is no larger than what each example has at its positions."""
    positions, depth, width = product.a.shape[2], product.a.shape[3], product.g.shape[3]
    return None not in (positions, depth, width) and positions >= min(depth, width)


def _one_after_another(rows):
    ids = tf.concat([f.ids for f in rows], 1)
    return Rows(ids, tf.concat([f.g for f in rows], 1), rows[0].shape)


def _beside_each_other(products):
    a = tf.concat([f.a for f in products], 2)
    g = tf.concat([f.g for f in products], 2)
    return Product(a, g, products[0].shape, products[0].layout)


def side_by_side(forms):
    """The forms with the small per-example gradients joined into one: fewer operations.

    Returns:
      ``(joined, apart)``: the forms, and a function from their weighted sums to those of the
      forms that were given.
    """
    small = [k for k, f in enumerate(forms) if type(f) is PerExample and f.size <= _SMALL]
    if len(small) < 2:
        return forms, lambda sums: sums
    others = [k for k in range(len(forms)) if k not in small]
    sizes = [forms[k].size for k in small]
    joined = tf.concat([shapes.rows(forms[k].values, forms[k].size) for k in small], 1)

    def apart(sums):
        *rest, flat = sums
        pieces = [tf.reshape(p, forms[k].shape) for k, p in zip(small, tf.split(flat, sizes))]
        found = dict(zip([*others, *small], [*rest, *pieces]))
        return [found[k] for k in range(len(forms))]

    return [*(forms[k] for k in others), PerExample(joined, (sum(sizes),))], apart


def zero_rows(forms, finite):
    """Each form's tensors with the rows of non-finite examples zeroed, decided in the graph.

    Such rows are rare, and passing over every activation is not free, so it is done only
    when there is one.
    """
    tensors = [f.tensors() for f in forms]
    flat = tf.nest.flatten(tensors)

    def zeroed():
        return [tf.where(shapes.rows(finite, *[1] * (t.shape.rank - 1)), t, 0.0) for t in flat]

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
