"""Layers without a rule: the vector-Jacobian product of that one layer for each example.

The recorded call is run again on one example at a time, vectorized over the batch, and
differentiated with respect to the layer's weights only. So any layer that treats examples
independently works, and only its own cost is paid twice.
"""

import keras
import tensorflow as tf

from keras_dp import _keras
from keras_dp.clipping import vectorized
from keras_dp.clipping.forms import PerExample
from keras_dp.clipping.rules.rule import NotLayerwise


def per_example_gradients(use, gradients, scope, count=1):
    """Yields ``(variable, form)`` for each weight of the recorded layer.

    A unit of several rows is one small batch, so that the gradients of its rows are not made.

    Args:
      use: the recorded call.
      gradients: gradient of the loss with respect to each of its outputs.
      scope: the stateless scope of the forward pass.
      count: consecutive rows of one unit, int or scalar tensor.

    Raises:
      NotLayerwise: when the layer draws random numbers, which a second run would draw anew, or
        when it is not certain which row of its arguments belongs to which example.
    """
    layer, variables = use.layer, use.variables
    if _keras.drew_random_numbers(layer, scope):
        raise NotLayerwise(
            f"layer '{layer.path}' has no rule and draws random numbers, "
            "so that its call cannot be repeated"
        )
    batch = gradients[0].shape[0]
    leaves, rebuild = _split((use.args, use.kwargs), batch)
    if len(leaves) > 1 and not _is_of_keras(layer):
        raise NotLayerwise(
            f"layer '{layer.path}' has no rule and is called on several tensors that are as long "
            "as the batch, but a table or a mask that all examples share may be so too"
        )

    def one(row):
        inputs, output_gradients = row
        weights = [tf.convert_to_tensor(v.value) for v in variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            with keras.StatelessScope(state_mapping=list(zip(variables, weights))):
                args, kwargs = rebuild(inputs)
                outputs = layer(*args, **kwargs)
            outputs = [
                o for o in tf.nest.flatten(outputs) if tf.is_tensor(o) and o.dtype.is_floating
            ]
        for output, g in zip(outputs, output_gradients):
            if not output.shape.is_compatible_with(g.shape):
                raise NotLayerwise(
                    f"layer '{layer.path}' has no rule, and one example of its input does not "
                    "give one example of its output"
                )
        found = tape.gradient(
            outputs,
            weights,
            output_gradients=output_gradients,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.cast(tf.convert_to_tensor(f), tf.float32) for f in found]

    rows = ([_by_unit(t, count) for t in leaves], [_by_unit(g, count) for g in gradients])
    if _needs_a_loop(layer):
        signature = [tf.TensorSpec(v.shape, tf.float32) for v in variables]
        values = tf.map_fn(one, rows, fn_output_signature=signature, parallel_iterations=1)
    else:
        values = tf.vectorized_map(one, rows)
    for variable, value in zip(variables, values):
        yield variable, PerExample(value, variable.shape)


def _is_of_keras(layer):
    """Whether the layer is one of Keras's own, whose arguments are all rows of the examples."""
    return type(layer).__module__.split(".")[0] == "keras"


def _by_unit(tensor, count):
    """``[units * count, ...]`` -> ``[units, count, ...]``."""
    if isinstance(count, int) and count == 1:
        return tf.expand_dims(tensor, 1)
    result = tf.reshape(tensor, tf.concat([[-1, count], tf.shape(tensor)[1:]], 0))
    known = isinstance(count, int)
    units = tensor.shape[0] // count if known and tensor.shape[0] is not None else None
    result.set_shape([units, count if known else None, *tensor.shape[1:]])
    return result


def _needs_a_loop(layer):
    """Whether TensorFlow's vectorizer fails on the layer: recurrent loops, grouped convolutions."""
    nested = _keras.all_layers(layer)
    recurrent = any(isinstance(inner, keras.layers.RNN) for inner in nested)
    return recurrent or vectorized.unsupported_layer(layer) is not None


def _split(arguments, batch):
    """The tensors that have the batch axis, and a function that puts others in their place."""
    flat = tf.nest.flatten(arguments)
    batched = [
        tf.is_tensor(t) and t.shape.rank not in (None, 0) and t.shape[0] == batch for t in flat
    ]
    leaves = [t for t, b in zip(flat, batched) if b]

    def rebuild(replacements):
        replacements = iter(replacements)
        values = [next(replacements) if b else t for t, b in zip(flat, batched)]
        return tf.nest.pack_sequence_as(arguments, values)

    return leaves, rebuild
