"""PAIR: one example moves the private gradient by C / batch_size, whatever it holds."""

import numpy as np
import pytest

import keras_dp
from tests.fixtures import checks, zoo

CORRUPTIONS = {"huge": 1e30, "nan": np.nan, "inf": np.inf, "other": -3.0}


def _corrupted(x, value):
    x = x.copy()
    x[0] = 5 if x.dtype.kind == "i" else value
    return x


def _check(name, value, sensitivity=0.3, **args):
    model = zoo.build(name)
    x, y = zoo.batch(model)

    def make():
        return keras_dp.DPSGD(
            1.0, l2_norm_clip=sensitivity, noise_multiplier=1.0, batch_size=3, seed=1, **args
        )

    checks.check_pair(model, make, x, y, _corrupted(x, value), sensitivity, batch_size=3)


pytestmark = pytest.mark.filterwarnings("ignore:keras_dp. seed=1 fixes the noise")


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("name", zoo.FEW)
def test_models(name, corruption):
    _check(name, CORRUPTIONS[corruption])


@pytest.mark.parametrize(
    "args",
    [
        {"clipping": "automatic"},
        {"microbatch_size": 2},
        {"backend": "vectorized"},
        {"backend": "loop"},
    ],
    ids=str,
)
@pytest.mark.parametrize("corruption", ["nan", "huge"])
def test_arguments(args, corruption):
    _check("conv2d", CORRUPTIONS[corruption], **args)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in zoo.ZOO if n not in zoo.FEW])
def test_zoo(name):
    names = list(CORRUPTIONS)
    _check(name, CORRUPTIONS[names[list(zoo.ZOO).index(name) % len(names)]])


def test_a_coupled_model_is_refused():
    """Mean over the batch in a Lambda: PAIR would fail, so training must not start."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Lambda(lambda x: x - keras.ops.mean(x, axis=0, keepdims=True)),
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=3),
        loss="sparse_categorical_crossentropy",
    )
    with pytest.raises(keras_dp.IncompatibleModelError, match="influence each other"):
        model.fit(*zoo.batch(zoo.build("dense")), verbose=0)
