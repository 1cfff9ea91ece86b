"""The compared models in Flax: channels last, the batch as the first axis."""

import flax.linen as nn


class EncoderBlock(nn.Module):
    dim: int
    heads: int

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(epsilon=1e-5)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(h)
        h = nn.LayerNorm(epsilon=1e-5)(x)
        h = nn.gelu(nn.Dense(4 * self.dim)(h), approximate=False)
        return x + nn.Dense(self.dim)(h)


class ResidualBlock(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x):
        h = nn.relu(self._conv_norm(x, 3, self.stride))
        h = self._conv_norm(h, 3, 1)
        if self.stride != 1 or x.shape[-1] != self.width:
            x = self._conv_norm(x, 1, self.stride)
        return nn.relu(h + x)

    def _conv_norm(self, x, kernel, stride):
        x = nn.Conv(self.width, (kernel, kernel), stride, use_bias=False)(x)
        return nn.GroupNorm(16, epsilon=1e-5)(x)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.Dense(1024)(x))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (8, 8), 2, padding="SAME")(x))
        x = nn.max_pool(x, (2, 2), (1, 1))
        x = nn.relu(nn.Conv(32, (4, 4), 2, padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), (1, 1))
        x = nn.relu(nn.Dense(32)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


class ResNet18(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(64, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.GroupNorm(16, epsilon=1e-5)(x))
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            x = ResidualBlock(width, stride)(x)
            x = ResidualBlock(width, 1)(x)
        return nn.Dense(10)(x.mean((1, 2)))


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(192, (4, 4), 4, padding="VALID")(x)
        x = x.reshape(x.shape[0], 64, 192)
        x = x + self.param("position", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(6):
            x = EncoderBlock(192, 3)(x)
        return nn.Dense(10)(nn.LayerNorm(epsilon=1e-5)(x).mean(1))


class TextTransformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(10_000, 128)(x)
        for _ in range(2):
            x = EncoderBlock(128, 4)(x)
        return nn.Dense(2)(nn.LayerNorm(epsilon=1e-5)(x).mean(1))


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.OptimizedLSTMCell(128))(nn.Embed(10_000, 64)(x))
        return nn.Dense(2)(x[:, -1])


_MODELS = {
    "mlp": MLP,
    "cnn": CNN,
    "resnet18": ResNet18,
    "vit": ViT,
    "text_unordered": TextTransformer,
    "lstm": LSTM,
}


def build(name):
    """The model of benchmarks/zoo.py with that name."""
    return _MODELS[name]()
