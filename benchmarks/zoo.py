"""The models that speed and memory are measured on, with their data and batch sizes.

No framework is imported here until a model is built: the programs that start the measurements and
those of other libraries, which have models of their own, read the same table.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model and its data.

    Attributes:
      function: name of a function of ``models``; it is called with ``arguments``.
      batch_size: examples of a step.
      large: ``(batch size, microbatch size)`` of the measurement with microbatches. Plain Keras
        has to hold that batch in memory, so it is smaller for larger models.
      input_shape: shape of one example.
      classes: number of logits.
      parameters: number of trained weights; every library's version must have as many.
      vocabulary: number of tokens, or None for inputs of floating point.
    """

    function: str
    batch_size: int
    large: tuple
    input_shape: tuple
    classes: int
    parameters: int
    vocabulary: int | None = None
    arguments: dict = dataclasses.field(default_factory=dict)

    def build(self):
        """The model, in Keras."""
        import models

        return getattr(models, self.function)(**self.arguments)

    def data(self, rows):
        """Random examples ``[rows, *input_shape]``, channels last, and labels ``[rows]``."""
        rng = np.random.default_rng(0)
        shape = (rows, *self.input_shape)
        if self.vocabulary is None:
            x = rng.standard_normal(shape, dtype=np.float32)
        else:
            x = rng.integers(0, self.vocabulary, shape, dtype=np.int32)
        return x, rng.integers(0, self.classes, rows, dtype=np.int32)


GREY, COLOUR = (28, 28, 1), (32, 32, 3)

ZOO = {
    "mlp": Entry("mlp", 256, (4096, 2048), (784,), 10, 1_863_690),
    "cnn": Entry("cnn", 256, (4096, 256), GREY, 10, 26_010),
    "resnet18": Entry("resnet", 32, (256, 32), COLOUR, 10, 11_173_962),
    "vit": Entry("vit", 64, (512, 64), COLOUR, 10, 2_693_194),
    "text": Entry("text_transformer", 64, (1024, 64), (128,), 2, 1_693_442, 10_000),
    "lstm": Entry("lstm", 64, (4096, 512), (64,), 2, 739_074, 10_000),
    "wrn16_4": Entry("wide_resnet", 32, (256, 32), COLOUR, 10, 2_748_890),
    "vit12": Entry(
        "vit",
        16,
        (128, 16),
        COLOUR,
        10,
        21_341_578,
        arguments={"dim": 384, "depth": 12, "heads": 6},
    ),
    # TensorFlow Privacy's fast clipping has no rule for a position table.
    "text_unordered": Entry(
        "text_transformer",
        64,
        (1024, 64),
        (128,),
        2,
        1_677_058,
        10_000,
        arguments={"positions": False},
    ),
}

# What `make bench` measures, and what the other libraries are compared on.
OWN = tuple(name for name in ZOO if name != "text_unordered")
COMPARED = ("mlp", "cnn", "lstm", "text_unordered", "vit", "resnet18")
