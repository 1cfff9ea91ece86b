"""Turns 8x8 digits into images like MNIST's, and distorts images at random.

What is known about MNIST here is its public description only: 20x20 digits, centred by their mass
in 28x28 images, in ink that is nearly black or white.
"""

import numpy as np
from scipy import ndimage


def enlarge(images, box=20, size=28):
    """Draws small images smoothly into a box in the middle of larger ones.

    Args:
      images: float array ``[examples, side, side]`` in [0, 1].
      box: pixels across which ``side`` pixels are stretched, by cubic splines.
      size: side of the result.

    Returns:
      float32 array ``[examples, size, size]`` in [0, 1].
    """
    side = images.shape[-1]
    border = 2  # the spline needs room outside the image, where there is no ink
    line = _centred(size) * side / box + (side - 1) / 2 + border
    grid = np.meshgrid(line, line, indexing="ij")
    padded = np.pad(images, ((0, 0), (border, border), (border, border)))
    drawn = [ndimage.map_coordinates(image, grid, order=3, mode="constant") for image in padded]
    return np.clip(drawn, 0, 1).astype(np.float32)


def distort(
    images,
    rng,
    rotation=18,
    scale=(0.9, 1.2),
    aspect=0.3,
    shear=0.5,
    shift=2.5,
    bend=1.8,
    threshold=(0.15, 0.5),
    contrast=(1.5, 4.0),
):
    """Writes each digit in another hand: slant, size, place, shape and weight of the stroke.

    Args:
      images: float array ``[examples, size, size]`` in [0, 1], dark background.
      rng: ``numpy.random.Generator``.
      rotation: greatest rotation in degrees, either way.
      scale: least and greatest size, as a factor.
      aspect: greatest logarithm of the factor by which height grows and width shrinks.
      shear: greatest slant, in columns a row, either way.
      shift: greatest distance of the centre of mass from the middle, in pixels along each axis.
      bend: standard deviation, in pixels, of the displacements at the nodes of a 5x5 grid, between
        which they are interpolated (Simard et al. 2003 call such distortions elastic).
      threshold: least and greatest grey value that becomes black. A higher one thins the stroke.
      contrast: least and greatest factor on the grey values above the threshold.

    Returns:
      float32 array of the shape of ``images``, in [0, 1].
    """
    count, size, _ = images.shape

    def uniform(low, high):
        return rng.uniform(low, high, count).astype(np.float32)

    y, x = np.meshgrid(_centred(size), _centred(size), indexing="ij")
    angle = np.deg2rad(uniform(-rotation, rotation))
    cos, sin, slant = np.cos(angle), np.sin(angle), uniform(-shear, shear)
    size_factor, aspect_factor = uniform(*scale), np.exp(uniform(-aspect, aspect))
    # From places in the new image back to places in the old one: scale, slant, rotate.
    y = _per_example(1 / (size_factor * aspect_factor)) * y
    x = _per_example(aspect_factor / size_factor) * x + _per_example(slant) * y
    cos, sin = _per_example(cos), _per_example(sin)
    y, x = cos * y - sin * x, sin * y + cos * x
    mass_y, mass_x = _centres_of_mass(images)
    y = y + _per_example(mass_y + uniform(-shift, shift)) + _bend(rng, count, size, bend)
    x = x + _per_example(mass_x + uniform(-shift, shift)) + _bend(rng, count, size, bend)
    moved = _interpolate(images, y, x)
    thinned = moved - _per_example(uniform(*threshold))
    return np.clip(thinned * _per_example(uniform(*contrast)), 0, 1)


def _centred(size):
    """The coordinates of a row of pixels, 0 in the middle."""
    return np.arange(size, dtype=np.float32) - (size - 1) / 2


def _per_example(values):
    return values[:, None, None]


def _centres_of_mass(images):
    """Where the ink is on average, ``[examples]`` rows and columns from the first pixel."""
    line = np.arange(images.shape[-1], dtype=np.float32)
    mass = np.maximum(images.sum((1, 2)), 1e-6)
    return images.sum(2) @ line / mass, images.sum(1) @ line / mass


def _bend(rng, count, size, stddev, nodes=5):
    """Smooth random displacements ``[count, size, size]`` in pixels."""
    place = np.linspace(0, nodes - 1, size, dtype=np.float32)
    weights = np.maximum(0, 1 - np.abs(place[:, None] - np.arange(nodes)))  # linear interpolation
    displacements = stddev * rng.standard_normal((count, nodes, nodes), np.float32)
    return (weights @ displacements @ weights.T).astype(np.float32)


def _interpolate(images, y, x):
    """Values of the images at real coordinates, bilinear, 0 outside."""
    count, size, _ = images.shape
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    y, x = (np.clip(c + 1, 0, size + 0.999) for c in (y, x))  # one pixel of border
    top, left = np.floor(y), np.floor(x)
    down, right = y - top, x - left
    top, left = top.astype(np.int32), left.astype(np.int32)
    first = np.arange(count, dtype=np.int32)[:, None, None] * (size + 2) ** 2
    first = first + top * (size + 2) + left
    flat = padded.ravel()
    upper = flat[first] * (1 - right) + flat[first + 1] * right
    lower = flat[first + size + 2] * (1 - right) + flat[first + size + 3] * right
    return upper * (1 - down) + lower * down
