"""Rules: from what was recorded of a layer to the form of each weight's gradients.

A rule holds for exactly the classes it is registered for: a subclass may compute something
else, so it is left to the fallback, which is always right.
"""

import keras

from keras_dp import _keras
from keras_dp.clipping.rules import (
    attention,
    convolution,
    lora,
    normalization,
    prelu,
    recurrent,
    reversible_embedding,
    time_distributed,
)
from keras_dp.clipping.rules.rule import Rule, before_activation

_ATTENTION = Rule(attention.copied, attention.copied_weights)

_RULES = {
    keras.layers.Dense: Rule(lora.dense, holds=lora.with_or_without),
    keras.layers.EinsumDense: Rule(lora.einsum_dense, holds=lora.is_product),
    keras.layers.Conv1D: Rule(lora.convolution, holds=lora.is_ungrouped),
    keras.layers.Conv2D: Rule(lora.convolution, holds=lora.is_ungrouped),
    keras.layers.Conv3D: Rule(lora.convolution, holds=lora.is_ungrouped),
    keras.layers.Conv1DTranspose: Rule(convolution.transposed),
    keras.layers.Conv2DTranspose: Rule(convolution.transposed),
    keras.layers.Conv3DTranspose: Rule(convolution.transposed),
    keras.layers.SeparableConv1D: Rule(convolution.separable),
    keras.layers.SeparableConv2D: Rule(convolution.separable),
    keras.layers.DepthwiseConv1D: Rule(convolution.depthwise),
    keras.layers.DepthwiseConv2D: Rule(convolution.depthwise),
    keras.layers.Embedding: Rule(lora.embedding, holds=lora.with_or_without),
    keras.layers.ReversibleEmbedding: Rule(
        reversible_embedding.reversible_embedding,
        reversible_embedding.before_soft_cap,
        holds=lora.with_or_without,
    ),
    keras.layers.Attention: _ATTENTION,
    keras.layers.AdditiveAttention: _ATTENTION,
    keras.layers.LayerNormalization: Rule(
        normalization.forms, normalization.record, holds=normalization.holds
    ),
    keras.layers.GroupNormalization: Rule(
        normalization.forms, normalization.record, holds=normalization.holds
    ),
    keras.layers.RMSNormalization: Rule(
        normalization.forms, normalization.record, holds=normalization.holds
    ),
    keras.layers.PReLU: Rule(prelu.prelu),
    keras.layers.LSTM: Rule(recurrent.plain, recurrent.record, whole=True, holds=recurrent.holds),
    keras.layers.GRU: Rule(recurrent.gru, recurrent.record, whole=True, holds=recurrent.holds),
    keras.layers.SimpleRNN: Rule(
        recurrent.plain, recurrent.record, whole=True, holds=recurrent.holds
    ),
}

# Layers whose call is another one while recording: function(recorder, layer, *args, **kwargs).
_CALLS = {keras.layers.TimeDistributed: time_distributed.time_as_rows}


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
    changed = getattr(layer, "quantization_mode", None) is not None or "call" in layer.__dict__
    if rule is None or changed or not rule.holds(layer):
        return None
    own = _keras.own_trainable_variables(layer)
    if not rule.whole and len(own) < len(layer.trainable_variables):
        return None  # an activation with weights, say
    return rule


def is_whole(layer):
    """Whether one rule, or one run of the fallback, answers for ``layer`` and all that is in it."""
    rule = rule_for(layer)
    # An RNN calls its cell inside a loop, where nothing can be recorded.
    return isinstance(layer, keras.layers.RNN) if rule is None else rule.whole


def call_while_recording(layer):
    """What replaces the layer's call while it is recorded, or None."""
    return None if "call" in layer.__dict__ else _CALLS.get(type(layer))
