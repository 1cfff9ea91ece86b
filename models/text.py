"""Text classifiers: a small transformer and an LSTM."""

import keras

from models.transformer import LearnedPosition, encoder_block


def text_transformer(
    sequence_length=128,
    vocabulary_size=10_000,
    num_classes=2,
    dim=128,
    depth=2,
    heads=4,
    mlp_dim=None,
    positions=True,
    name="text_transformer",
):
    """A transformer encoder over tokens, averaged into one vector a text.

    Args:
      sequence_length: tokens a text; shorter texts are padded by the caller, and the padding is
        seen like any other token.
      vocabulary_size: tokens are integers in ``[0, vocabulary_size)``.
      num_classes: number of logits.
      dim: channels of the residual stream, a multiple of ``heads``.
      depth: number of encoder blocks.
      heads: attention heads a block.
      mlp_dim: hidden units of each block's MLP; ``4 * dim`` by default.
      positions: whether a learned vector a position is added; without it the order of the tokens
        is not seen.
      name: the model's name.

    Returns:
      A ``keras.Model`` from tokens ``[batch, sequence_length]`` to logits ``[batch, num_classes]``.
    """
    layers = keras.layers
    inputs = keras.Input((sequence_length,), dtype="int32")
    x = layers.Embedding(vocabulary_size, dim, name="tokens")(inputs)
    if positions:
        x = LearnedPosition(name="position")(x)
    for _ in range(depth):
        x = encoder_block(x, heads, mlp_dim or 4 * dim)
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name=name)


def lstm(sequence_length=64, vocabulary_size=10_000, num_classes=2, dim=64, units=128, name="lstm"):
    """An LSTM over tokens whose last state is classified.

    Args:
      sequence_length: tokens a text.
      vocabulary_size: tokens are integers in ``[0, vocabulary_size)``.
      num_classes: number of logits.
      dim: size of the token vectors.
      units: size of the LSTM's state.
      name: the model's name.

    Returns:
      A ``keras.Model`` from tokens ``[batch, sequence_length]`` to logits ``[batch, num_classes]``.
    """
    layers = keras.layers
    inputs = keras.Input((sequence_length,), dtype="int32")
    x = layers.Embedding(vocabulary_size, dim, name="tokens")(inputs)
    x = layers.LSTM(units, name="lstm")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name=name)
