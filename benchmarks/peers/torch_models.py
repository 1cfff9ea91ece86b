"""The compared models in PyTorch: channels first, the batch as the first axis."""

import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from torch import nn


class Position(nn.Module):
    def __init__(self, positions, dim):
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(positions, dim))

    def forward(self, x):
        return x + self.table


class Attention(nn.Module):
    """Self-attention of linear layers, which every mode of Opacus knows."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (self._by_head(layer(x)) for layer in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v)
        return self.out(h.transpose(1, 2).flatten(2))

    def _by_head(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class EncoderBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def conv_norm(before, width, kernel, stride):
    return nn.Sequential(
        nn.Conv2d(before, width, kernel, stride, kernel // 2, bias=False), nn.GroupNorm(16, width)
    )


class ResidualBlock(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.first = conv_norm(before, width, 3, stride)
        self.second = conv_norm(width, width, 3, 1)
        self.shortcut = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = conv_norm(before, width, 1, stride)

    def forward(self, x):
        h = F.relu(self.first(x))
        return F.relu(self.second(h) + self.shortcut(x))


class Patches(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv2d(3, dim, 4, 4)

    def forward(self, x):
        return self.conv(x).flatten(2).transpose(1, 2)


class MeanOverPositions(nn.Module):
    def forward(self, x):
        return x.mean(1)


class LSTM(nn.Module):
    """Opacus has an LSTM of its own; the plain model has PyTorch's.

    Both add two biases where Keras has one, so the second is frozen at zero.
    """

    def __init__(self, private):
        super().__init__()
        self.embedding = nn.Embedding(10_000, 64)
        self.lstm = (DPLSTM if private else nn.LSTM)(64, 128, batch_first=True)
        self.logits = nn.Linear(128, 2)
        for name, parameter in self.lstm.named_parameters():
            if name.endswith("bias_hh_l0"):
                nn.init.zeros_(parameter).requires_grad_(False)

    def forward(self, x):
        return self.logits(self.lstm(self.embedding(x))[0][:, -1])


def _mlp():
    return nn.Sequential(
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


def _cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def _resnet18():
    layers, before = [conv_norm(3, 64, 3, 1), nn.ReLU()], 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(before, width, stride), ResidualBlock(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def _vit():
    blocks = [EncoderBlock(192, 3) for _ in range(6)]
    return nn.Sequential(
        Patches(192),
        Position(64, 192),
        *blocks,
        nn.LayerNorm(192),
        MeanOverPositions(),
        nn.Linear(192, 10),
    )


def _text_transformer():
    blocks = [EncoderBlock(128, 4) for _ in range(2)]
    return nn.Sequential(
        nn.Embedding(10_000, 128),
        *blocks,
        nn.LayerNorm(128),
        MeanOverPositions(),
        nn.Linear(128, 2),
    )


_MODELS = {
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet18": _resnet18,
    "vit": _vit,
    "text_unordered": _text_transformer,
}


def build(name, private):
    """The model of benchmarks/zoo.py with that name.

    Args:
      name: the name.
      private: whether Opacus will train it.
    """
    return LSTM(private) if name == "lstm" else _MODELS[name]()
