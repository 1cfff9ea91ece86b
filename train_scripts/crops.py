"""How photographs become inputs of a network: crops, flips, one size, one range of values.

As usual for ImageNet, and as Kurakin et al. 2022 (arXiv 2201.12328) do it. Means and deviations are
those of ImageNet's pixels, public numbers, used for every data set.
"""

import numpy as np
import tensorflow as tf

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)

CENTRAL = 224 / 256  # of the shorter side, in testing
AREA, ASPECT, ATTEMPTS = (0.08, 1.0), (3 / 4, 4 / 3), 10


class Crop:
    """A function from an example to ``(image, label)``, for ``map_fn`` of the samplers.

    Args:
      to_pair: with ``image_and_label``, as ``image_folder.ToPair`` and ``tfds_data.ToPair`` have.
      size: side of the square images that it makes.
      random: whether it crops and mirrors at random, for training; else it takes the middle.
    """

    def __init__(self, to_pair, size, random):
        self._to_pair, self._size = to_pair, size
        self.random = random

    def __call__(self, example, rng=None):
        """``(float32 image [size, size, 3], int64 label)``; looks at this example only."""
        image, label = self._to_pair.image_and_label(example)
        if image.shape[-1] == 1:
            image = np.repeat(image, 3, -1)
        box = random_box(*image.shape[:2], rng) if self.random else central_box(*image.shape[:2])
        top, left, height, width = box
        image = image[top : top + height, left : left + width]
        if self.random and rng.random() < 0.5:
            image = image[:, ::-1]
        size = (self._size, self._size)
        image = tf.image.resize(image, size, tf.image.ResizeMethod.BICUBIC, antialias=True)
        return (image.numpy() / 255 - MEAN) / DEVIATION, label


def central_box(height, width):
    """Top, left, height and width of the square in the middle, 7/8 of the shorter side."""
    side = max(1, int(CENTRAL * min(height, width)))
    return (height - side + 1) // 2, (width - side + 1) // 2, side, side


def random_box(height, width, rng):
    """Top, left, height and width of a random part of an image.

    Its area is uniform in 8 % to 100 % of the image's and its aspect ratio uniform in 3/4 to 4/3.
    After ten boxes that do not fit, it is the middle.
    """
    for _ in range(ATTEMPTS):
        area, aspect = height * width * rng.uniform(*AREA), rng.uniform(*ASPECT)
        h, w = int(round(np.sqrt(area / aspect))), int(round(np.sqrt(area * aspect)))
        if 0 < h <= height and 0 < w <= width:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    return central_box(height, width)
