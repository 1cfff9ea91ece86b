"""LAMB as its paper and TensorFlow Addons have it: weight decay inside the trust ratio.

You et al. 2019 (arXiv 1904.00962), Algorithm 2, for each variable w:

    update = m_hat / (sqrt(v_hat) + epsilon) + weight_decay * w
    w     -= lr * (|w| / |update|) * update

``keras.optimizers.Lamb`` takes the decay out of the trust ratio and decays w before the
update; without weight decay the two are the same. The trust ratio of a private run is
made of the noisy gradient alone, so it costs no privacy.
"""

import re

import keras
from keras import ops

from keras_dp.optimizers.adam import NoiseBiasCorrection


def trust_ratio(weight, update):
    """|w| / |update|, or 1 where either norm is 0."""
    weight_norm, update_norm = (ops.sqrt(ops.sum(ops.square(v))) for v in (weight, update))
    defined = ops.logical_and(weight_norm > 0, update_norm > 0)
    return ops.where(defined, weight_norm / ops.where(defined, update_norm, 1.0), 1.0)


class Lamb(NoiseBiasCorrection, keras.optimizers.Lamb):
    """``keras.optimizers.Lamb`` with weight decay and exclusions as in TensorFlow Addons.

    Args:
      exclude_from_weight_decay: list of regular expressions. A variable whose path (such
        as "dense/bias") holds a match is not decayed.
      exclude_from_layer_adaptation: list of regular expressions. A variable whose path
        holds a match has trust ratio 1. Default: the same as ``exclude_from_weight_decay``.
    """

    def __init__(
        self,
        *args,
        exclude_from_weight_decay=None,
        exclude_from_layer_adaptation=None,
        **kwargs,
    ):
        decay = _patterns("exclude_from_weight_decay", exclude_from_weight_decay)
        adaptation = _patterns("exclude_from_layer_adaptation", exclude_from_layer_adaptation)
        super().__init__(*args, **kwargs)
        self._patterns = {"decay": decay, "adaptation": adaptation}

    def build(self, var_list):
        """Makes the moments, and decides which variables are decayed and adapted."""
        if self.built:
            return
        super().build(var_list)
        decay, adaptation = self._patterns["decay"], self._patterns["adaptation"]
        if adaptation is None:
            adaptation = decay
        self._decayed = [self._use_weight_decay(v) and not _matches(decay, v) for v in var_list]
        self._adapted = [not _matches(adaptation, v) for v in var_list]

    def update_step(self, gradient, variable, learning_rate):
        """One LAMB update of one variable."""
        index = self._get_variable_index(variable)
        update = self.direction(gradient, variable)
        if self.weight_decay and self._decayed[index]:
            update = update + ops.cast(self.weight_decay, variable.dtype) * variable
        if self._adapted[index]:
            update = trust_ratio(variable, update) * update
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * update)

    def _apply_weight_decay(self, variables):
        """Nothing: the decay is a part of the update."""

    def get_config(self):
        """The config of ``keras.optimizers.Lamb`` with the exclusions."""
        return super().get_config() | {
            f"exclude_from_{what}": None if patterns is None else list(patterns)
            for what, patterns in (
                ("weight_decay", self._patterns["decay"]),
                ("layer_adaptation", self._patterns["adaptation"]),
            )
        }


def _patterns(name, value):
    if value is None:
        return None
    if isinstance(value, str) or not all(isinstance(p, str) for p in value):
        raise ValueError(f"{name} must be None or a list of strings. Received: {value!r}")
    return list(value)


def _matches(patterns, variable):
    path = getattr(variable, "path", variable.name)
    return any(re.search(p, path) for p in patterns or ())
