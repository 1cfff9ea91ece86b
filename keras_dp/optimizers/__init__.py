"""The DP optimizers: Keras optimizers whose gradients are clipped per example and noised."""

import keras

from keras_dp.optimizers.adam import Adam, AdamW
from keras_dp.optimizers.lamb import Lamb
from keras_dp.optimizers.momentum import Momentum
from keras_dp.optimizers.private import make_private

DPSGD = make_private(keras.optimizers.SGD, "DPSGD")
DPMomentum = make_private(Momentum, "DPMomentum")
DPAdam = make_private(Adam, "DPAdam")
DPAdamW = make_private(AdamW, "DPAdamW")
DPLamb = make_private(Lamb, "DPLamb")

__all__ = ["DPAdam", "DPAdamW", "DPLamb", "DPMomentum", "DPSGD", "make_private"]
