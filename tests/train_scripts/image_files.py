"""Writes small folders of images, one folder a class, for programs that read such."""

import numpy as np
import tensorflow as tf


def write_image_folder(folder, classes=3, train=40, test=8, seed=0, size=(40, 36)):
    """Striped images whose stripes' width and colour tell the class; sizes differ a little."""
    rng = np.random.default_rng(seed)
    for part, count in (("train", train), ("validation", test)):
        for label in range(classes):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True)
            for number in range(count):
                height, width = (n + int(rng.integers(5)) for n in size)
                image = striped(rng, height, width, label)
                if number % 2:
                    (place / f"{number}.png").write_bytes(tf.io.encode_png(image).numpy())
                else:
                    (place / f"{number}.JPEG").write_bytes(tf.io.encode_jpeg(image).numpy())
    return folder


def striped(rng, height, width, label):
    """uint8 ``[height, width, 3]``."""
    x = np.arange(width)[None, :, None] * np.ones((height, 1, 1))
    wave = np.sin(x * 2 * np.pi / (4 + 4 * label) + rng.uniform(0, 6))
    colour = np.roll([1.0, 0.5, 0.2], label)
    noise = rng.normal(0, 0.1, (height, width, 3))
    return np.uint8(np.clip(127 + 100 * (wave * colour + noise), 0, 255))
