"""What the auditing programs work on: examples and a model, the user's or a small default."""

import pathlib

import keras
import numpy as np

from train_scripts import data
from train_scripts.errors import DataNotFoundError


def load_examples(source):
    """Examples and their integer labels.

    Args:
      source: ``"digits"``, or the path of an .npz file with the arrays x and y.

    Returns:
      ``(x, y)``, arrays of one length.

    Raises:
      ValueError: no such file, or one without these arrays, or the digits' package is missing.
    """
    if source == "digits":
        try:
            images, labels = data.load_digits()
        except DataNotFoundError as error:
            raise ValueError(str(error)) from error
        return images[..., None], labels
    if not pathlib.Path(source).is_file():
        raise ValueError(f"--data takes digits or an .npz file with x and y; received {source!r}.")
    try:
        with np.load(source) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError) as error:
        raise ValueError(f"--data={source} cannot be read as an .npz file: {error}") from error
    if not {"x", "y"} <= set(found) or len(found["x"]) != len(found["y"]):
        shapes = {name: value.shape for name, value in found.items()}
        raise ValueError(f"--data={source} must hold x and y of one length; it has {shapes}.")
    return found["x"], found["y"]


def load_model(path):
    """A model that was saved as a .keras file."""
    try:
        return keras.models.load_model(path)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--model={path} cannot be loaded: {error}") from error


def small_classifier(shape, classes):
    """A network of one hidden layer whose outputs are logits."""
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )
