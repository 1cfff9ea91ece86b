"""The models that speed and memory are measured on, with the batch size of each."""

from models import cnn, lstm, mlp, resnet, text_transformer, vit

# name: (function that builds it, batch size)
ZOO = {
    "mlp": (mlp, 256),
    "cnn": (cnn, 256),
    "resnet18": (resnet, 32),
    "vit": (vit, 64),
    "text": (text_transformer, 64),
    "lstm": (lstm, 64),
}
