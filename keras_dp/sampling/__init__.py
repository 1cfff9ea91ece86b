"""Batches for private training: how examples are drawn, read and padded."""

from keras_dp.sampling.draws import OVERFLOW_PROBABILITY, default_capacity, poisson_indices
from keras_dp.sampling.fixed import FixedBatches
from keras_dp.sampling.padded import Padded
from keras_dp.sampling.poisson import PoissonSampler
from keras_dp.sampling.records import ArrayRecordSource, write_array_record

__all__ = [
    "OVERFLOW_PROBABILITY",
    "ArrayRecordSource",
    "FixedBatches",
    "Padded",
    "PoissonSampler",
    "default_capacity",
    "poisson_indices",
    "write_array_record",
]
