"""ReversibleEmbedding: a table that is read by rows, and that gives logits in reverse."""

import keras
import tensorflow as tf

from keras_dp.clipping.rules import lora
from keras_dp.clipping.rules.dense import matrix_product
from keras_dp.clipping.rules.rule import before_activation, replaced


def before_soft_cap(use, call, watch):
    """Runs the call; in reverse, watches the logits before they are capped."""
    cap = use.layer.logit_soft_cap
    if not is_reverse(use) or cap is None:
        return before_activation(use, call, watch)
    with replaced(use.layer, logit_soft_cap=None):
        logits = before_activation(use, call, watch)
    return keras.ops.tanh(logits / cap) * cap


def reversible_embedding(use, g):
    """z = table[ids], and in reverse z = x @ table^T or z = x @ reverse_embeddings.

    The gradient of the tied table is the sum of both, whose norm is that of
    :class:`~keras_dp.clipping.forms.Tied`.
    """
    layer = use.layer
    if not is_reverse(use):
        yield from lora.embedding(use, g)
        return
    x, g = tf.cast(use.input, tf.float32), tf.cast(g, tf.float32)
    if not layer.tie_weights:
        kernel = layer.reverse_embeddings
        if kernel.trainable:
            yield kernel, matrix_product(x, g, kernel.shape)
        return
    if layer._embeddings.trainable:
        yield layer._embeddings, matrix_product(g, x, layer._embeddings.shape)
    if layer.lora_enabled:
        yield from lora.reversed_embedding(layer, x, g)


def is_reverse(use):
    """Whether the recorded call was one with ``reverse=True``."""
    return use.args[1] if len(use.args) > 1 else use.kwargs.get("reverse", False)
