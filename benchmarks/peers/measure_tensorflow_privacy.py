"""TensorFlow Privacy on tf.keras 2, in an environment of its own; prints a line of JSON.

plain       tf.keras without privacy; --jit_compile compiles the step with XLA
vectorized  VectorizedDPKerasSGDOptimizer: the Jacobian of the losses
dpmodel     DPModel: tf.vectorized_map over examples; --jit_compile is its use_xla
fast        DPModel with a layer registry: fast gradient clipping; the same
"""

import keras
import tensorflow as tf
import tensorflow_privacy
from absl import app
from tensorflow_privacy.privacy.fast_gradient_clipping import gradient_clipping_utils
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry as registries
from tensorflow_privacy.privacy.fast_gradient_clipping.registry_functions import (
    einsum_dense,
    layer_normalization,
    multi_head_attention,
)

from benchmarks import clock, fit

FLAGS = clock.FLAGS
MODES = ("plain", "vectorized", "dpmodel", "fast")


def _registry():
    """The default rules, for Dense and Embedding, and the others that the library has."""
    registry = registries.make_default_layer_registry()
    for layer, rule in (
        (keras.layers.EinsumDense, einsum_dense.einsum_layer_computation),
        (keras.layers.LayerNormalization, layer_normalization.layer_normalization_computation),
        (
            keras.layers.MultiHeadAttention,
            multi_head_attention.multi_head_attention_layer_computation,
        ),
    ):
        registry.insert(layer, rule)
    return registry


def _dp_model(model, privacy):
    registry = _registry() if FLAGS.mode == "fast" else None
    private = tensorflow_privacy.DPModel(
        inputs=model.inputs,
        outputs=model.outputs,
        layer_registry=registry,
        use_xla=FLAGS.jit_compile,
        **privacy,
    )
    if registry and not gradient_clipping_utils.all_trainable_layers_are_registered(
        private, registry
    ):
        # It would silently be DPModel without a registry.
        raise NotImplementedError("no rule for some layer")
    return private


def _measure(entry, batch_size, step_clock):
    privacy = {
        "l2_norm_clip": clock.L2_NORM_CLIP,
        "noise_multiplier": clock.NOISE_MULTIPLIER,
    }
    model, optimizer = entry.build(), keras.optimizers.SGD(clock.LEARNING_RATE)
    arguments = {}
    if FLAGS.mode == "plain":
        arguments = {"jit_compile": FLAGS.jit_compile or None}
    elif FLAGS.mode == "vectorized":
        arguments = {"reduction": "none"}
        optimizer = tensorflow_privacy.VectorizedDPKerasSGDOptimizer(
            num_microbatches=batch_size, learning_rate=clock.LEARNING_RATE, **privacy
        )
    else:
        model = _dp_model(model, privacy)
    fit.compile_classifier(model, optimizer, **arguments)
    batches = fit.repeated_batch(*entry.data(batch_size))
    fit.timed_fit(model, step_clock, batches, steps_per_epoch=step_clock.steps)
    versions = f"TensorFlow Privacy {tensorflow_privacy.__version__} on TensorFlow {tf.__version__}"
    return model.count_params(), versions


def main(argv):
    """Measures what the flags say."""
    del argv
    clock.report(_measure)


if __name__ == "__main__":
    clock.define_flags(MODES)
    app.run(main)
