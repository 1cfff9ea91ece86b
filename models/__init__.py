"""Plain Keras models for the training scripts, the tests and the benchmarks.

Nothing here knows about privacy: any of these models becomes private by the optimizer that it is
compiled with. None of them uses batch normalisation.
"""

from models.activations import TemperedSigmoid
from models.cnn import cnn, deep_cnn
from models.convolutions import StandardizedConv2D
from models.heads import freeze_parts, linear_head, logits_layer, parts, replace_head
from models.mlp import mlp
from models.resnet import resnet
from models.scattering import (
    Scattering2D,
    normalized_linear,
    scattering_cnn,
    scattering_features,
)
from models.text import lstm, text_transformer
from models.transfer_cnn import transfer_cnn
from models.transformer import ClassToken, LearnedPosition
from models.vit import SIZES as VIT_SIZES
from models.vit import vit, vit_variant
from models.vit_weights import load_vit_weights
from models.wide_resnet import wide_resnet

__all__ = [
    "ClassToken",
    "LearnedPosition",
    "Scattering2D",
    "StandardizedConv2D",
    "TemperedSigmoid",
    "VIT_SIZES",
    "cnn",
    "deep_cnn",
    "freeze_parts",
    "linear_head",
    "load_vit_weights",
    "logits_layer",
    "lstm",
    "mlp",
    "normalized_linear",
    "parts",
    "replace_head",
    "resnet",
    "scattering_cnn",
    "scattering_features",
    "text_transformer",
    "transfer_cnn",
    "vit",
    "vit_variant",
    "wide_resnet",
]
