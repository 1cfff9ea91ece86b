"""Small trainings for the tests of callbacks, and what they cost by an independent count."""

import keras
import numpy as np

import keras_dp
from keras_dp.accounting import compute_epsilon
from keras_dp.callbacks import EpsilonLogger

N, BATCH, DELTA = 40, 8, 1e-3
STEPS_PER_EPOCH = 5
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def sgd(noise_multiplier=2.0, batch_size=BATCH):
    return keras_dp.DPSGD(
        0.1, l2_norm_clip=1.0, noise_multiplier=noise_multiplier, batch_size=batch_size
    )


def compiled(optimizer=None, **kwargs):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=sgd() if optimizer is None else optimizer, loss="mse", **kwargs)
    return model


def sampler(batch_size=BATCH, **kwargs):
    return keras_dp.PoissonSampler(X, Y, batch_size=batch_size, **kwargs)


def poisson(steps, noise_multiplier=2.0):
    return compute_epsilon(
        num_examples=N,
        batch_size=BATCH,
        noise_multiplier=noise_multiplier,
        delta=DELTA,
        steps=steps,
    )


def shuffled(epochs):
    return compute_epsilon(
        num_examples=N,
        batch_size=BATCH,
        noise_multiplier=2.0,
        delta=DELTA,
        epochs=epochs,
        sampling="shuffle",
    )


def shuffle_logger(**kwargs):
    settings = {"num_examples": N, "sampling": "shuffle", "delta": DELTA, "verbose": 0}
    return EpsilonLogger(**(settings | kwargs))
