"""The encoder block and the position table that the vision and text transformers share."""

import keras


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


def encoder_block(x, heads, mlp_dim):
    """Self-attention and an MLP, each after layer normalisation and with a residual connection.

    Args:
      x: ``[batch, positions, dim]``; ``dim`` is split over the heads.
      heads: number of attention heads.
      mlp_dim: hidden units of the MLP.

    Returns:
      A tensor of the shape of ``x``.

    Raises:
      ValueError: when ``dim`` is not a multiple of ``heads``.
    """
    layers = keras.layers
    dim = x.shape[-1]
    if dim % heads:
        raise ValueError(f"dim must be a multiple of heads, received dim={dim}, heads={heads}.")
    h = layers.LayerNormalization(epsilon=1e-5)(x)
    x = layers.Add()([x, layers.MultiHeadAttention(heads, dim // heads)(h, h)])
    h = layers.LayerNormalization(epsilon=1e-5)(x)
    h = layers.Dense(mlp_dim, activation="gelu")(h)
    return layers.Add()([x, layers.Dense(dim)(h)])
