"""Plain Keras models for the training scripts, the tests and the benchmarks.

Nothing here knows about privacy: any of these models becomes private by the optimizer that it is
compiled with. None of them uses batch normalisation.
"""

from models.cnn import cnn
from models.mlp import mlp
from models.resnet import resnet
from models.text import lstm, text_transformer
from models.transfer_cnn import transfer_cnn
from models.transformer import LearnedPosition
from models.vit import vit
from models.wide_resnet import wide_resnet

__all__ = [
    "LearnedPosition",
    "cnn",
    "lstm",
    "mlp",
    "resnet",
    "text_transformer",
    "transfer_cnn",
    "vit",
    "wide_resnet",
]
