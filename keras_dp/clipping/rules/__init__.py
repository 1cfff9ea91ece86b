"""Rules: from what was recorded of a layer to the form of each weight's gradients.

A rule holds for exactly the classes it is registered for: a subclass may compute something
else, so it is left to the fallback, which is always right.
"""

import keras

from keras_dp.clipping.rules import convolution, dense, embedding, normalization, prelu
from keras_dp.clipping.rules.rule import Rule, before_activation

_RULES = {
    keras.layers.Dense: Rule(dense.dense),
    keras.layers.EinsumDense: Rule(dense.einsum_dense),
    keras.layers.Conv1D: Rule(convolution.convolution),
    keras.layers.Conv2D: Rule(convolution.convolution),
    keras.layers.Conv3D: Rule(convolution.convolution),
    keras.layers.DepthwiseConv1D: Rule(convolution.depthwise),
    keras.layers.DepthwiseConv2D: Rule(convolution.depthwise),
    keras.layers.Embedding: Rule(embedding.embedding),
    keras.layers.LayerNormalization: Rule(normalization.affine),
    keras.layers.GroupNormalization: Rule(normalization.affine),
    keras.layers.RMSNormalization: Rule(normalization.affine),
    keras.layers.PReLU: Rule(prelu.prelu),
}

# Layers that call their sublayers inside a loop: the fallback runs them as a whole.
_WHOLE = (keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed)


def register_rule(layer_class, *, record=before_activation, whole=False):
    """Registers how the per-example gradients of a layer class of yours are found.

    Without a rule such a layer goes through the fallback, which runs the layer a second time
    for every example: right, but slower. Used as a decorator::

        @keras_dp.register_rule(Scale)              # Scale: z = x * w, w of shape [D]
        def scale(use, g):
            yield use.layer.w, keras_dp.rules.PerExample(use.input * g, use.layer.w.shape)

    Check it with :func:`keras_dp.testing.check_rule`: a wrong rule clips wrongly, and
    nothing else would tell.

    Args:
      layer_class: a subclass of ``keras.layers.Layer``. The rule holds for this class alone,
        not for its subclasses.
      record: function ``record(use, call, watch)``: runs the layer's call, ``call(*use.args,
        **use.kwargs)``, returns what it returns, and hands every tensor whose gradient the rule
        wants to ``watch``. Default: what the layer's ``activation`` is applied to, or the output
        where there is none. Everything behind a watched tensor must read no trained weight.
      whole: whether the rule answers for the weights of nested layers too.

    Returns:
      A decorator for a function ``rule(use, *gradients)``, one gradient for each watched tensor,
      with the batch as first axis. It yields ``(variable, form)`` for each trained variable of the
      layer, ``form`` being a :class:`keras_dp.rules.Form`: it knows each example's squared norm
      (``squared_norms``) and the sum over the batch of factor times gradient (``weighted_sum``).

    Raises:
      ValueError: when ``layer_class`` is no layer class, or is Keras's own.
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, keras.layers.Layer)):
        raise ValueError(
            "register_rule takes a subclass of keras.layers.Layer and is used as a decorator of a "
            f"rule. Received: {layer_class!r}"
        )
    if layer_class.__module__.split(".")[0] == "keras":
        raise ValueError(
            f"register_rule received keras.layers.{layer_class.__name__}. How layers of Keras are "
            "handled is keras_dp's to say (docs/layers.md); subclass it and register the subclass."
        )

    def register(forms):
        _RULES[layer_class] = Rule(forms, record, whole)
        return forms

    return register


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
