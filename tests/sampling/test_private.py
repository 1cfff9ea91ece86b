"""The sampler and the private step together: what is drawn is what is clipped."""

import keras
import numpy as np
import pytest

import keras_dp
from keras_dp import sampling
from keras_dp.errors import PrivacyError
from keras_dp.sampling import PoissonSampler

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 2)).astype(np.float32) * 2
Y = RNG.normal(size=(120, 1)).astype(np.float32)


def linear(jit_compile=False, noise_multiplier=0.0, **kwargs):
    """One example's gradient is y_i x_i, whatever the weights."""
    inputs = keras.Input((2,))
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs)
    model = keras.Model(inputs, outputs)
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=1.0, noise_multiplier=noise_multiplier, **{"batch_size": 16, **kwargs}
    )
    model.compile(optimizer, lambda y, y_pred: y * y_pred, jit_compile=jit_compile)
    return model


def clipped(gradients):
    return gradients / np.maximum(np.linalg.norm(gradients, axis=-1, keepdims=True), 1)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("drawn", [0, 3, 8, 20, 60])
def test_pieces_make_the_update_of_the_whole_draw(monkeypatch, drawn, jit_compile):
    """Draws that are empty, fill some pieces, and exceed the capacity of 24."""
    chosen = np.arange(drawn) * 2
    monkeypatch.setattr(sampling.poisson, "poisson_indices", lambda *_: chosen)
    sampler = PoissonSampler(
        X, Y, batch_size=16, capacity=24, physical_batch_size=8, steps_per_epoch=2
    )
    model = linear(jit_compile)
    model.fit(sampler, verbose=0)
    assert model.optimizer.iterations == 2
    expected = -2 / 16 * clipped(Y[chosen] * X[chosen]).sum(0)
    np.testing.assert_allclose(model.get_weights()[0][:, 0], expected, rtol=1e-5, atol=1e-6)


def test_an_epoch_of_pieces_is_accounted_by_its_draws():
    sampler = PoissonSampler(X, Y, batch_size=16, physical_batch_size=8)
    model = linear(noise_multiplier=1.0)
    logger = keras_dp.callbacks.EpsilonLogger(sampler, delta=1e-3, verbose=0)
    history = model.fit(sampler, epochs=2, callbacks=[logger], verbose=0).history
    assert model.optimizer.iterations == 16 == 2 * sampler.steps_per_epoch
    expected = keras_dp.compute_epsilon(
        num_examples=120, batch_size=16, noise_multiplier=1.0, delta=1e-3, steps=16
    )
    np.testing.assert_allclose(history["epsilon"][-1], expected)


@pytest.mark.parametrize("physical", [None, 4])
def test_a_user_is_clipped_once(monkeypatch, physical):
    """The gradient of a user is the mean over the drawn examples of theirs, clipped."""
    users = np.arange(120) // 5
    monkeypatch.setattr(sampling.poisson, "poisson_indices", lambda *_: np.array([1, 3, 20]))
    sampler = PoissonSampler(
        X, Y, users=users, examples_per_user=8, batch_size=4, steps_per_epoch=1,
        physical_batch_size=physical,
    )  # fmt: skip
    model = linear(batch_size=4, examples_per_user=8)
    model.fit(sampler, verbose=0)
    means = [(Y * X)[users == user].mean(0) for user in (1, 3, 20)]
    expected = -clipped(np.array(means)).sum(0) / 4
    np.testing.assert_allclose(model.get_weights()[0][:, 0], expected, rtol=1e-5, atol=1e-6)
    assert model.optimizer.iterations == 1


@pytest.mark.parametrize("weight", [0.0, 1e6])
def test_class_weight_keeps_the_bound(weight):
    """However heavy a class is, no example moves the sum by more than C."""
    labels = (np.arange(120) % 2)[:, None]
    sampler = PoissonSampler(X, labels, batch_size=120, class_weight={1: weight})
    model = linear(batch_size=120)
    model.fit(sampler, verbose=0)
    factors = np.where(labels == 1, weight, 1.0)
    expected = -clipped(factors * labels * X).sum(0) / 120
    np.testing.assert_allclose(model.get_weights()[0][:, 0], expected, rtol=1e-4, atol=1e-6)


def test_validation_split_is_refused_by_keras_with_a_sentence():
    with pytest.raises(ValueError, match="validation_split"):
        linear().fit(PoissonSampler(X, Y, batch_size=16), validation_split=0.5, verbose=0)


@pytest.mark.parametrize("number", [1, 16])
def test_one_example_and_a_full_batch(number):
    sampler = PoissonSampler(X[:number], Y[:number], batch_size=number)
    model = linear(batch_size=number)
    model.fit(sampler, epochs=3, verbose=0)
    expected = -3 * clipped(Y[:number] * X[:number]).mean(0)
    np.testing.assert_allclose(model.get_weights()[0][:, 0], expected, rtol=1e-5, atol=1e-6)
    assert model.optimizer.iterations == 3


def test_pieces_without_a_dp_optimizer_are_refused():
    """Each would be an update of its own."""
    sampler = PoissonSampler(X, Y, batch_size=16, physical_batch_size=8)
    model = linear()
    model.compile("sgd", "mse")
    with pytest.raises(PrivacyError, match="only a DP optimizer puts together"):
        model.fit(sampler, verbose=0)
