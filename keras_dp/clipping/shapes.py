"""Reshaping with an unknown batch size, in as few operations as can be: a trace has thousands."""

import math

import tensorflow as tf


def rows(tensor, *sizes):
    """``tensor`` as ``[batch, *sizes]``.

    Args:
      tensor: ``[batch, ...]``; or any tensor, when all sizes are known.
      *sizes: ints, scalar tensors, or at most one None: whatever is left.
    """
    if all(isinstance(size, int) for size in sizes):
        as_it_is = tensor.shape.rank == len(sizes) + 1 and tensor.shape[1:] == list(sizes)
        return tensor if as_it_is else tf.reshape(tensor, [-1, *sizes])
    shape = [tf.shape(tensor)[0], *(-1 if size is None else size for size in sizes)]
    result = tf.reshape(tensor, tf.stack(shape))
    result.set_shape(
        [tensor.shape[0], *(size if isinstance(size, int) else None for size in sizes)]
    )
    return result


def last(tensor, count, sizes):
    """The last ``count`` axes as ``sizes``, ints; at most one axis before them."""
    if tensor.shape.rank == count:
        return tf.reshape(tensor, sizes)
    return rows(tensor, *sizes)


def flat(tensor):
    """``[batch, ...]`` -> ``[batch, n]``."""
    sizes = tensor.shape[1:]
    if len(sizes) == 1:
        return tensor
    return rows(tensor, None if None in sizes else math.prod(sizes))
