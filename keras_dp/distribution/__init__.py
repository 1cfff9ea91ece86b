"""Private training on several devices: strategies by name."""

from keras_dp.distribution.cluster import is_chief
from keras_dp.distribution.strategies import get_strategy
from keras_dp.distribution.trainer import install

__all__ = ["get_strategy", "install", "is_chief"]
