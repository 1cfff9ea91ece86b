"""The vectorized and loop backends: the gradient of every example, from the whole model.

Slower than the layerwise backend, and for models it cannot see into: the model and its
loss run on batches of one, so nothing can couple examples. ``vectorized`` does it for all
examples at once by ``tf.vectorized_map``, ``loop`` for one after the other.
"""

import keras
import tensorflow as tf

from keras_dp import _keras
from keras_dp.clipping import clip, example_loss, rows, shapes
from keras_dp.clipping.passes import Pass

# An odd constant that spreads the rows of a batch over the seeds.
_ROW_STRIDE = 2654435761


def clipped_sums(model, loss, variables, batch, privacy, loss_scale, *, loop):
    """One pass over a batch; arguments and result as in ``layerwise.clipped_sums``.

    With ``loop`` the batch has to be a single unit: the microbatches are the loop. The rows of
    a unit come one after another in both, so that there is one gradient for each unit.
    """
    tensors, rebuild = rows.flatten((batch.x, batch.y, batch.sample_weight))
    count = batch.rows_per_unit
    size = tf.shape(tensors[0])[0] // count
    numbers = tf.range(tf.cast(size * count, tf.int64))
    shares = None if batch.shares is None else tf.reshape(batch.shares, [-1, count])

    unpack = {}  # how to put a prediction and its masks together again

    def one(arguments):
        row, number = arguments
        *numbers, y_pred = _example(
            model, loss, variables, rows.single(rebuild(row)), number, loss_scale
        )
        masks = keras.tree.map_structure(_keras.get_mask, y_pred)
        predicted, unpack["prediction"] = rows.flatten((y_pred, masks))
        return *numbers, [t[0] for t in predicted]

    def row_of_every_unit(k):
        """Gradients, times the share of the row, and what else is known of it."""
        row = _take_one_of(count, k, (tensors, numbers))
        if loop:
            results = one(tf.nest.map_structure(lambda t: t[0], row))
            results = tf.nest.map_structure(lambda t: t[None], results)
        else:
            results = _of_every_row(one, row)
        gradients, *others = results
        if shares is not None:
            gradients = [
                shapes.rows(shares[:, k], *[1] * (g.shape.rank - 1)) * g for g in gradients
            ]
        return gradients, others

    gradients, others = _sum_over_rows(row_of_every_unit, count)
    losses, added, predicted = others
    y_pred = keras.tree.map_structure(_keras.with_mask, *unpack["prediction"](predicted))
    _advance_seeds(model)
    squared = tf.add_n([tf.reduce_sum(tf.square(tf.reshape(g, [size, -1])), 1) for g in gradients])
    factors, finite = clip.clip_factors(privacy, squared, batch.counted)
    sums = []
    for g in gradients:
        flat = tf.reshape(g, [size, -1])
        flat = tf.where(finite[:, None], flat, 0.0)
        sums.append(tf.reshape(tf.linalg.matvec(flat, factors, transpose_a=True), g.shape[1:]))
    return Pass(sums, losses - added, added, y_pred, None)


def _of_every_row(one, structure):
    """``one`` of every row, at once.

    Where TensorFlow does not know the size of the batch when it traces, there are rows of zeros
    up to two, whose results are left out: the vectorizer's shapes come out wrong for one row if
    the outputs of two layers are added, and it stacks no results of no row.
    """
    first = tf.nest.flatten(structure)[0]
    if first.shape[0] is not None:
        return tf.vectorized_map(one, structure)
    size = tf.shape(first)[0]

    def two_or_more(tensor):
        shape = tf.concat([[tf.maximum(2 - size, 0)], tf.shape(tensor)[1:]], 0)
        return tf.concat([tensor, tf.zeros(shape, tensor.dtype)], 0)

    results = tf.vectorized_map(one, tf.nest.map_structure(two_or_more, structure))
    return tf.nest.map_structure(lambda t: t[:size], results)


def _sum_over_rows(row_of_every_unit, count):
    """Adds up the gradients of the rows of each unit, and puts all else in the order of rows.

    Args:
      row_of_every_unit: function of the number of a row within its unit, which returns
        ``(gradients, others)`` with the units as first axis.
      count: int, the rows of a unit.

    Returns:
      Gradients ``[units, ...]`` and others ``[units * count, ...]``.
    """
    gradients, others = row_of_every_unit(0)
    if count == 1:
        return gradients, others
    collected = [
        tf.TensorArray(t.dtype, count, element_shape=t.shape).write(0, t)
        for t in tf.nest.flatten(others)
    ]

    def body(k, gradients, collected):
        more, others_of_row = row_of_every_unit(k)
        gradients = [g + m for g, m in zip(gradients, more)]
        collected = [c.write(k, t) for c, t in zip(collected, tf.nest.flatten(others_of_row))]
        return k + 1, gradients, collected

    _, gradients, collected = tf.while_loop(
        lambda k, *_: k < count,
        body,
        (tf.constant(1), gradients, collected),
        parallel_iterations=1,
    )
    flat = [_by_row(c.stack()) for c in collected]
    return gradients, tf.nest.pack_sequence_as(others, flat)


def _take_one_of(count, k, structure):
    """Rows k, count + k, 2 count + k and so on: one of each unit."""
    if count == 1:
        return structure

    def taken(tensor):
        by_unit = tf.reshape(tensor, tf.concat([[-1, count], tf.shape(tensor)[1:]], 0))
        row = tf.gather(by_unit, k, axis=1)
        row.set_shape([None, *tensor.shape[1:]])
        return row

    return tf.nest.map_structure(taken, structure)


def _by_row(tensor):
    """``[count, units, ...]`` -> ``[units * count, ...]``."""
    swapped = tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])
    result = tf.reshape(swapped, tf.concat([[-1], tf.shape(swapped)[2:]], 0))
    result.set_shape([None, *tensor.shape[2:]])
    return result


def unsupported_layer(model):
    """The first layer that ``tf.vectorized_map`` computes wrongly, or None."""
    grouped = (layer for layer in _keras.all_layers(model) if getattr(layer, "groups", 1) != 1)
    return next((g for g in grouped if hasattr(g, "kernel_size")), None)


def _example(model, loss, variables, example, number, loss_scale):
    """Gradients, loss, added losses and prediction of one example, given as a batch of one."""
    x, y, sample_weight = example
    weights = [tf.convert_to_tensor(v.value) for v in variables]
    state = list(zip(variables, weights))
    for generator in _keras.seed_generators(model):
        # Every row draws from a stream of its own: no two examples share a mask.
        seed, drawn = tf.unstack(tf.convert_to_tensor(generator.state.value))
        row_seed = seed + tf.cast((number + 1) * _ROW_STRIDE % 2**31, seed.dtype)
        state.append((generator.state, tf.stack([row_seed, drawn])))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(weights)
        with (
            keras.StatelessScope(state_mapping=state, collect_losses=True) as scope,
            _keras.without_weight_regularizers(variables),
        ):
            y_pred = _keras.call_model(model, x)
            value = example_loss.loss_of(model, loss, x, y, y_pred, sample_weight)
            added = [tf.reduce_sum(tf.cast(a, tf.float32)) for a in scope.losses]
            added = tf.add_n(added) if added else tf.constant(0.0)
            if loss is not None:
                value += added
            elif _keras.overrides_compute_loss(model):
                added = tf.constant(0.0)  # whether they count is for that method to say
        total = value * loss_scale
    found = tape.gradient(total, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    found = [tf.cast(tf.convert_to_tensor(g), tf.float32) / loss_scale for g in found]
    return found, value, added, y_pred


def _advance_seeds(model):
    """Moves every random state past what the rows have drawn."""
    for generator in _keras.seed_generators(model):
        state = tf.convert_to_tensor(generator.state.value)
        generator.state.assign(state + tf.constant([0, 1024], state.dtype))
