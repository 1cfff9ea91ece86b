"""Rules: from what was recorded of a layer to the form of each weight's gradients.

A rule is a function ``rule(use, g)`` that yields ``(variable, form)`` for every trainable
weight of the layer; ``use`` is the recorded call and ``g`` the gradient with respect to
its recorded output. It holds for exactly the classes it is registered for: a subclass may
compute something else, so it is left to the fallback, which is always right.
"""

import keras

from keras_dp.clipping.rules import convolution, dense, embedding, normalization, prelu

_RULES = {
    keras.layers.Dense: dense.dense,
    keras.layers.EinsumDense: dense.einsum_dense,
    keras.layers.Conv1D: convolution.convolution,
    keras.layers.Conv2D: convolution.convolution,
    keras.layers.Conv3D: convolution.convolution,
    keras.layers.DepthwiseConv1D: convolution.depthwise,
    keras.layers.DepthwiseConv2D: convolution.depthwise,
    keras.layers.Embedding: embedding.embedding,
    keras.layers.LayerNormalization: normalization.affine,
    keras.layers.GroupNormalization: normalization.affine,
    keras.layers.RMSNormalization: normalization.affine,
    keras.layers.PReLU: prelu.prelu,
}

# Layers that call their sublayers inside a loop: the fallback runs them as a whole.
_WHOLE = (keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed)


def rule_for(layer):
    """The rule of ``layer``, or None when it has to go through the fallback."""
    rule = _RULES.get(type(layer))
    changed = (
        getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None) is not None
        or "call" in layer.__dict__
    )
    return None if changed else rule


def is_whole(layer):
    """Whether the fallback has to run ``layer`` with all that is in it."""
    return isinstance(layer, _WHOLE)
