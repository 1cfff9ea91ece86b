"""The scattering transform: numbers of another implementation, and what it must do on paper."""

import pathlib

import numpy as np
import pytest

import models
from models.scattering import filter_bank

# Computed once by Kymatio 0.3.0 with NumPy 2 and SciPy 1.16, in float32: Scattering2D(J, shape, L)
# on `image` below, channels brought last; of the two larger ones every third row and column.
GOLDEN = np.load(pathlib.Path(__file__).with_name("scattering_golden.npz"))


def image(height, width, channels):
    """An image without any symmetry, the same everywhere."""
    numbers = np.arange(height * width * channels).reshape(height, width, channels)
    return ((numbers * 7919) % 251 / 250).astype(np.float32)


@pytest.mark.parametrize("name", GOLDEN.files)
def test_the_numbers_of_kymatio(name):
    height, width, channels, scales, angles = map(int, name.split("_"))
    x = image(height, width, channels)
    found = models.scattering_features(x[None], scales, angles)[0]
    found = found[::3, ::3] if height >= 28 else found
    assert found.shape == GOLDEN[name].shape
    np.testing.assert_allclose(found, GOLDEN[name], atol=3e-4)


def test_wavelets_have_no_mean_and_cover_frequencies_once():
    """Littlewood-Paley: no frequency is amplified much, so that the transform is stable."""
    bank = filter_bank(32, 32)
    assert bank.channels == 81 == 1 + 2 * 8 + 8 * 8
    energy = 0
    for wavelets in bank.wavelets:
        assert wavelets.shape == (8, 40, 40)
        assert np.abs(wavelets[:, 0, 0]).max() < 1e-6
        energy = energy + (wavelets**2).sum(0)
    both = energy + np.roll(energy[::-1, ::-1], 1, (0, 1))  # real images: w and -w count together
    assert both.max() / 2 < 1.2


def test_the_average_keeps_a_constant_and_nothing_else_sees_it():
    found = models.scattering_features(np.full((1, 28, 28, 1), 0.6, np.float32))[0]
    np.testing.assert_allclose(found[..., 0], 0.6, atol=1e-3)
    assert np.abs(found[..., 1:]).max() < 1e-3


def test_turned_images_turn_the_angles():
    """A quarter turn moves each angle by L / 2."""
    x = np.zeros((2, 28, 28, 1), np.float32)
    x[0, 6:19, 6:19] = image(13, 13, 1)  # around pixel 12, where the fourth of seven samples is
    x[1, 6:19, 6:19] = np.rot90(x[0, 6:19, 6:19])
    found, turned = models.scattering_features(x)[..., 1:17].reshape(2, 7, 7, 2, 8)
    found, back = found[1:6, 1:6], np.rot90(turned, -1)[1:6, 1:6]  # the borders are not alike
    # Half a turn more gives the conjugate of a wavelet, and of a real image the same modulus.
    np.testing.assert_allclose(np.roll(back, 4, -1), found, atol=0.02 * found.max())
    assert np.abs(back - found).max() > 0.1 * found.max()


def test_small_shifts_change_little():
    """Invariance to shifts below 2^J, which pixels do not have."""
    rng = np.random.default_rng(0)
    x = np.zeros((1, 32, 32, 1), np.float32)
    x[0, 8:24, 8:24, 0] = rng.uniform(size=(16, 16))
    shifted = np.roll(x, 1, 2)
    f, g = (models.scattering_features(z) for z in (x, shifted))
    assert np.linalg.norm(f - g) / np.linalg.norm(f) < 0.5 * (
        np.linalg.norm(x - shifted) / np.linalg.norm(x)
    )


def test_images_stand_apart_and_batches_change_nothing():
    x = np.random.default_rng(0).uniform(size=(5, 28, 28, 1)).astype(np.float32)
    together = models.scattering_features(x, batch_size=5)
    np.testing.assert_allclose(models.scattering_features(x, batch_size=2), together, atol=1e-5)
    np.testing.assert_allclose(models.Scattering2D()(x[3:4])[0], together[3], atol=1e-5)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"multiples of 2\^scales = 4, received 30 x 28"):
        models.scattering_features(np.zeros((1, 30, 28, 1)))


def test_normalized_linear_bounds_every_gradient():
    """The features of every image have norm 1, bright or dark."""
    import keras

    model = models.normalized_linear()
    features = keras.Model(model.input, model.get_layer("logits").input)
    x = np.random.default_rng(0).uniform(size=(4, 28, 28, 1)).astype(np.float32)
    x[1] *= 0.1
    norms = np.linalg.norm(features(models.scattering_features(x)), axis=-1)
    np.testing.assert_allclose(norms, 1, atol=1e-4)
