"""Units: which rows of a batch are clipped together, and what each adds to its unit's gradient.

A unit is what is protected: an example, one row, or a user, several consecutive rows. The loss
of a unit is the mean of the losses of its rows, and of the augmented copies of each of them (De
et al. 2022, arXiv 2204.13650, section 3.2). All of them together are clipped once, so that the
sensitivity is that of a single gradient.
"""

import dataclasses

import tensorflow as tf

from keras_dp.clipping import compilation, rows


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch whose rows come in groups, one for each unit.

    Attributes:
      x, y, sample_weight: the rows, nested; ``rows_per_unit`` consecutive ones for each unit.
      real: bool ``[rows]`` or None; the rows that hold an example.
      counted: bool ``[units]`` or None; the units that take part.
      shares: float32 ``[rows]`` or None; the part of a row's loss in its unit's, None for 1.
      rows_per_unit: int.
    """

    x: object
    y: object
    sample_weight: object
    real: tf.Tensor | None
    counted: tf.Tensor | None
    shares: tf.Tensor | None = None
    rows_per_unit: int = 1


def grouped(data, real, counted, privacy):
    """The batch that a pass runs on: rows repeated for their copies, and in groups.

    A missing row of a user has no share. Something has to stand in its place that the model
    cannot turn into NaN, so it is another row of that user.

    Args:
      data: ``(x, y, sample_weight)``, ``examples_per_user`` consecutive rows for each user.
      real: bool ``[rows]`` or None; the rows that hold an example.
      counted: bool ``[rows]`` or None; those whose gradients count.
      privacy: the optimizer's :class:`~keras_dp.clipping.settings.PrivacySettings`.

    Returns:
      A :class:`Batch`.
    """
    if privacy.rows_per_unit == 1:
        return Batch(*data, real, counted)
    per_user, copies = privacy.examples_per_user or 1, privacy.augmentations or 1
    size = rows.count(data)
    index = tf.range(size)
    if real is None:
        shares = tf.ones([size]) / per_user
    else:
        by_user = tf.reshape(real, [-1, per_user])
        number = tf.reduce_sum(tf.cast(by_user, tf.float32), 1, keepdims=True)
        shares = tf.reshape(tf.math.divide_no_nan(tf.cast(by_user, tf.float32), number), [-1])
        first = tf.argmax(tf.cast(by_user, tf.int32), 1, tf.int32)
        first += per_user * tf.range(tf.size(first))
        index = tf.where(real, index, tf.repeat(first, per_user))
    if counted is not None:
        shares = tf.where(counted, shares, 0.0)
        counted = tf.reduce_any(tf.reshape(counted, [-1, per_user]), 1)
    if copies > 1:
        index, shares = tf.repeat(index, copies), tf.repeat(shares / copies, copies)
        real = None if real is None else tf.repeat(real, copies)
    if real is not None or copies > 1:
        data = rows.gather(data, index)
    return Batch(*data, real, counted, shares, privacy.rows_per_unit)


def require_whole_users(size, per_user):
    """Raises when a batch of ``size`` rows, int or scalar tensor, is no multiple of a user's.

    XLA drops assertions, and logs that it does. Where it may compile the step, the reshaping of a
    size that is not static fails instead.
    """
    message = (
        f"examples_per_user={per_user} takes {per_user} consecutive rows for each user, those "
        "that are missing being padding (sample weight -0.0), so that a batch has a multiple of "
        f"{per_user} rows, and under a strategy every replica's share as well. "
        f"keras_dp.PoissonSampler(users=..., examples_per_user={per_user}) makes such batches."
    )
    if isinstance(size, int):
        if size % per_user:
            raise ValueError(f"{message} Received: {size} rows.")
    elif tf.executing_eagerly() or compilation.is_outside_xla():
        tf.debugging.assert_equal(size % per_user, 0, message)
