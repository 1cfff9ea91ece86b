"""What the vision and text transformers share: encoder block, position table, class token."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_dp_models")
class LearnedPosition(keras.layers.Layer):
    """Adds one learned vector a position: ``[batch, positions, dim]`` to the same shape."""

    def build(self, input_shape):
        """Makes the table ``[positions, dim]``; both sizes must be known."""
        if None in input_shape[1:]:
            raise ValueError(
                f"LearnedPosition needs a fixed number of positions and channels, received the "
                f"input shape {tuple(input_shape)}."
            )
        self.table = self.add_weight(
            name="table",
            shape=input_shape[1:],
            initializer=keras.initializers.RandomNormal(stddev=0.02),
        )

    def call(self, inputs):
        """Adds the table to every example."""
        return inputs + self.table


@keras.saving.register_keras_serializable(package="keras_dp_models")
class ClassToken(keras.layers.Layer):
    """Puts one learned vector before the positions: ``[batch, positions + 1, dim]``.

    What the encoder makes of it stands for the whole input (Devlin et al. 2019, arXiv 1810.04805).
    """

    def build(self, input_shape):
        """Makes the vector ``[1, 1, dim]``, zeros at first."""
        self.token = self.add_weight(name="token", shape=(1, 1, input_shape[-1]))
        self.token.assign(ops.zeros_like(self.token))

    def call(self, inputs):
        """The same vector, then the positions of each example."""
        token = ops.cast(self.token, inputs.dtype)
        return ops.concatenate([ops.zeros_like(inputs[:, :1]) + token, inputs], axis=1)


def encoder_block(x, heads, mlp_dim, epsilon=1e-5, dropout=0.0, name=None):
    """Self-attention and an MLP, each after layer normalisation and with a residual connection.

    Args:
      x: ``[batch, positions, dim]``; ``dim`` is split over the heads.
      heads: number of attention heads.
      mlp_dim: hidden units of the MLP.
      epsilon: of the layer normalisations.
      dropout: share of the outputs of attention and MLP that is dropped in training.
      name: prefix of the names of the layers, or None.

    Returns:
      A tensor of the shape of ``x``.

    Raises:
      ValueError: when ``dim`` is not a multiple of ``heads``.
    """
    layers = keras.layers
    dim = x.shape[-1]
    if dim % heads:
        raise ValueError(f"dim must be a multiple of heads, received dim={dim}, heads={heads}.")

    def named(part):
        return name and f"{name}_{part}"

    def residual(h, part):
        if dropout:
            h = layers.Dropout(dropout, name=named(f"{part}_dropout"))(h)
        return layers.Add(name=named(f"{part}_sum"))([x, h])

    h = layers.LayerNormalization(epsilon=epsilon, name=named("attention_norm"))(x)
    attention = layers.MultiHeadAttention(heads, dim // heads, name=named("attention"))
    x = residual(attention(h, h), "attention")
    h = layers.LayerNormalization(epsilon=epsilon, name=named("mlp_norm"))(x)
    h = layers.Dense(mlp_dim, activation="gelu", name=named("mlp1"))(h)
    return residual(layers.Dense(dim, name=named("mlp2"))(h), "mlp")
