"""Enlarging and distorting digits."""

import numpy as np
import pytest

from train_scripts import data, distort

NO_DISTORTION = dict(
    rotation=0,
    scale=(1, 1),
    aspect=0,
    shear=0,
    shift=0,
    bend=0,
    threshold=(0, 0),
    contrast=(1, 1),
)


@pytest.fixture(scope="module")
def digits():
    return distort.enlarge(data.load_digits()[0][:50])


def centre(images):
    line = np.arange(images.shape[-1])
    ink = images.sum((1, 2))
    return np.stack([images.sum(2) @ line, images.sum(1) @ line], -1) / ink[:, None]


def distorted(images, seed=0, **changes):
    return distort.distort(images, np.random.default_rng(seed), **NO_DISTORTION | changes)


def test_enlarge_keeps_the_drawing(digits):
    """Averages over the places of the small pixels give back the small image, smoothed."""
    small = data.load_digits()[0][:50]
    assert digits.shape == (50, 28, 28)
    assert digits.dtype == np.float32
    assert digits.min() >= 0
    assert digits.max() <= 1
    assert np.abs(digits[:, :2]).max() < 0.1
    assert np.abs(digits[:, 4:24, 4:24].mean((1, 2)) / small.mean((1, 2)) - 1).max() < 0.1
    middles = 4 + np.rint(np.arange(8) * 2.5 + 0.75).astype(int)
    sampled = digits[:, middles][:, :, middles]
    correlations = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(sampled, small)]
    assert min(correlations) > 0.97


def test_without_distortion_the_digit_is_only_centred(digits):
    moved = distorted(digits)
    np.testing.assert_allclose(centre(moved), 13.5, atol=0.1)
    np.testing.assert_allclose(moved.sum((1, 2)), digits.sum((1, 2)), rtol=0.01)
    already_centred = distorted(moved)
    assert np.abs(already_centred - moved).mean() < 0.01


def test_shift_moves_the_centre_by_at_most_its_argument(digits):
    distance = np.abs(centre(distorted(digits, shift=2.5)) - 13.5)
    assert distance.max() < 2.6
    assert distance.max() > 2


@pytest.mark.parametrize("scale", [0.8, 1.2])
def test_scale_changes_the_area(digits, scale):
    area = distorted(digits, scale=(scale, scale)).sum((1, 2)) / digits.sum((1, 2))
    np.testing.assert_allclose(area, scale**2, rtol=0.1)


def test_rotation_and_shear_turn_a_bar():
    bar = np.zeros((200, 28, 28), np.float32)
    bar[:, 6:22, 13:15] = 1
    line = np.arange(28) - 13.5

    def slopes(images):
        """Columns a row, from the second moments of the ink."""
        mixed = np.einsum("nyx,y,x->n", images, line, line)
        return mixed / np.einsum("nyx,y->n", images, line**2)

    assert np.abs(slopes(distorted(bar))).max() < 0.02
    shear = np.abs(slopes(distorted(bar, shear=0.4)))
    assert 0.3 < shear.max() < 0.45
    rotation = np.abs(slopes(distorted(bar, rotation=20)))
    assert 0.3 < rotation.max() < np.tan(np.deg2rad(21))


def test_threshold_thins_and_contrast_blackens(digits):
    assert distorted(digits, threshold=(0.4, 0.4)).sum() < 0.7 * digits.sum()
    assert distorted(digits, contrast=(3, 3)).sum() > 1.2 * digits.sum()


def test_bending_changes_shape_but_not_the_amount_of_ink(digits):
    plain, bent = distorted(digits), distorted(digits, bend=1.3)
    assert np.abs(bent - plain).mean() > 0.02
    assert abs(bent.sum() / plain.sum() - 1) < 0.05


def test_examples_differ_and_the_generator_decides(digits):
    same = np.repeat(digits[:1], 20, axis=0)
    one = distort.distort(same, np.random.default_rng(0))
    assert one.shape == same.shape
    assert one.dtype == np.float32
    assert (one.min(), one.max()) == (0, 1)
    assert min(np.abs(one[i] - one[j]).mean() for i in range(20) for j in range(i)) > 0.01
    np.testing.assert_array_equal(one, distort.distort(same, np.random.default_rng(0)))
    assert np.abs(one - distort.distort(same, np.random.default_rng(1))).mean() > 0.02


def test_an_empty_image_stays_empty():
    np.testing.assert_array_equal(
        distort.distort(np.zeros((3, 28, 28), np.float32), np.random.default_rng(0)), 0
    )
