"""Trainings that the tests of accounting share, and what is known about them."""

import dataclasses
import math
import warnings

import dp_accounting
import pytest
from scipy import optimize, stats

from keras_dp.accounting import Phase, epsilon_of_phases

HAS_TRUNCATION = hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent")
needs_truncation = pytest.mark.skipif(
    not HAS_TRUNCATION, reason="keras_dp refuses truncated draws with dp-accounting 0.5"
)

# An ordinary run. Tests change what they are about.
RUN = {"num_examples": 60000, "batch_size": 256, "noise_multiplier": 1.1, "delta": 1e-5}
TARGET = {"num_examples": 60000, "batch_size": 256, "delta": 1e-5, "target_epsilon": 3.0}


def quietly(function, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(**arguments)


def gaussian_epsilon(sigma, releases, delta):
    """Exact epsilon of composed Gaussians: Balle and Wang 2018 (arXiv 1805.06530), Theorem 8."""
    sigma = sigma / math.sqrt(releases)

    def excess(epsilon):
        a, b = 1 / (2 * sigma), epsilon * sigma
        return stats.norm.cdf(a - b) - math.exp(epsilon + stats.norm.logcdf(-a - b)) - delta

    return optimize.brentq(excess, 0.0, 1e4, xtol=1e-12)


class Training:
    """One kind of training, of any length."""

    def __init__(
        self, num_examples, batch_size, noise_multiplier, delta, sampling="poisson", **more
    ):
        self.delta = delta
        self.start = Phase(
            num_examples=num_examples,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            sampling=sampling,
            **more,
        )

    def phase(self, steps, epochs_begun=None):
        return dataclasses.replace(self.start, steps=steps, epochs_begun=epochs_begun)

    def epsilon(self, steps, epochs_begun=None):
        return epsilon_of_phases([self.phase(steps, epochs_begun)], self.delta)

    def pld_epsilon(self, steps, epochs_begun=None):
        return epsilon_of_phases([self.phase(steps, epochs_begun)], self.delta, "pld")
