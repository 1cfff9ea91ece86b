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


def per_example_gradients(use, gradients, scope):
    """Yields ``(variable, form)`` for each weight of the recorded layer.

    Args:
      use: the recorded call.
      gradients: gradient of the loss with respect to each of its outputs.
      scope: the stateless scope of the forward pass.

    Raises:
      NotLayerwise: when the layer draws random numbers, which a second run would draw anew.
    """
    layer, variables = use.layer, use.variables
    if _keras.drew_random_numbers(layer, scope):
        raise NotLayerwise(
            f"layer '{layer.path}' has no rule and draws random numbers, "
            "so that its call cannot be repeated"
        )
    batch = gradients[0].shape[0]
    leaves, rebuild = _split((use.args, use.kwargs), batch)

    def one(row):
        inputs, output_gradients = row
        weights = [tf.convert_to_tensor(v.value) for v in variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            with keras.StatelessScope(state_mapping=list(zip(variables, weights))):
                args, kwargs = rebuild([t[None] for t in inputs])
                outputs = layer(*args, **kwargs)
            outputs = [
                o for o in tf.nest.flatten(outputs) if tf.is_tensor(o) and o.dtype.is_floating
            ]
        found = tape.gradient(
            outputs,
            weights,
            output_gradients=[g[None] for g in output_gradients],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.cast(tf.convert_to_tensor(f), tf.float32) for f in found]

    rows = (leaves, list(gradients))
    if _needs_a_loop(layer):
        signature = [tf.TensorSpec(v.shape, tf.float32) for v in variables]
        values = tf.map_fn(one, rows, fn_output_signature=signature, parallel_iterations=1)
    else:
        values = tf.vectorized_map(one, rows)
    for variable, value in zip(variables, values):
        yield variable, PerExample(value, variable.shape)


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
