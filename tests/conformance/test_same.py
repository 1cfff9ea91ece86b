"""SAME: without noise and clip, every DP optimizer is its Keras optimizer."""

import keras
import pytest

import keras_dp
from tests.fixtures import checks

OFF = dict(l2_norm_clip=1e30, noise_multiplier=0.0, batch_size=8)
K = keras.optimizers

PAIRS = {
    "sgd": (keras_dp.DPSGD, K.SGD, dict(learning_rate=0.1)),
    "sgd_decay": (keras_dp.DPSGD, K.SGD, dict(learning_rate=0.1, weight_decay=0.01)),
    "nesterov": (
        keras_dp.DPMomentum,
        K.SGD,
        dict(learning_rate=0.1, momentum=0.8, nesterov=True),
    ),
    "adam": (keras_dp.DPAdam, K.Adam, dict(learning_rate=0.01)),
    "amsgrad": (keras_dp.DPAdam, K.Adam, dict(learning_rate=0.01, amsgrad=True)),
    "adamw": (keras_dp.DPAdamW, K.AdamW, dict(learning_rate=0.01, weight_decay=0.1)),
    "lamb": (keras_dp.DPLamb, K.Lamb, dict(learning_rate=0.01)),
    "ema": (keras_dp.DPSGD, K.SGD, dict(learning_rate=0.1, use_ema=True, ema_momentum=0.9)),
    "schedule": (
        keras_dp.DPSGD,
        K.SGD,
        dict(learning_rate=K.schedules.CosineDecay(0.1, 10, warmup_target=0.2, warmup_steps=3)),
    ),
}
MADE = [K.RMSprop, K.Adagrad, K.Adadelta, K.Adamax, K.Nadam, K.Ftrl, K.Lion, K.Adafactor]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("model", ["dense", "conv2d"])
def test_named(name, model):
    private, plain, args = PAIRS[name]
    # Adam divides by the root of the second moment, which blows up rounding where it is tiny.
    tolerance = 2e-5 if "adam" in name or name in ("amsgrad", "lamb") else 2e-6
    checks.check_same(private(**args, **OFF), plain(**args), model, tolerance=tolerance)


@pytest.mark.parametrize("plain", MADE, ids=lambda c: c.__name__)
def test_make_private(plain):
    private = keras_dp.make_private(plain)
    # Sign-like updates turn rounding of a gradient near zero into a step.
    checks.check_same(
        private(learning_rate=0.001, **OFF), plain(learning_rate=0.001), tolerance=1e-4
    )


def test_momentum_default():
    checks.check_same(
        keras_dp.DPMomentum(learning_rate=0.1, **OFF), K.SGD(learning_rate=0.1, momentum=0.9)
    )
