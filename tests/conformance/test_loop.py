"""LOOP over the zoo, the backends, static and dynamic batch sizes, with and without XLA."""

import numpy as np
import pytest

import keras_dp
from tests.fixtures import checks, zoo


def _clip(model, x, y):
    norms, _ = checks.plain_loop(model, x, y, 1.0)
    return float(np.median(norms))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_auto(name):
    model = zoo.build(name)
    x, y = zoo.batch(model)
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=_clip(model, x, y), noise_multiplier=0.0, batch_size=5
    )
    if name in zoo.NOT_LAYERWISE:
        with pytest.warns(UserWarning, match="backend='vectorized'.*read outside the call"):
            checks.check_loop(model, optimizer, x, y)
    else:
        checks.check_loop(model, optimizer, x, y)


@pytest.mark.parametrize("name", zoo.ONLY_XLA)
def test_channels_first(name):
    model = zoo.build(name)
    x, y = zoo.batch(model)
    norms, _ = checks.plain_loop(model, x, y, 1.0, jit_compile=True)
    optimizer = keras_dp.DPSGD(
        1.0,
        l2_norm_clip=float(np.median(norms)),
        noise_multiplier=0.0,
        batch_size=5,
        backend="layerwise",  # the eager trial run cannot compute them on a CPU
    )
    checks.check_loop(
        model, optimizer, x, y, static_batch=True, jit_compile=True, oracle_jit_compile=True
    )


# (microbatch_size, static_batch, jit_compile): every value of each beside every other value
# of the two others. The layerwise backend gets two of the four for each model, the others one.
SETTINGS = [(None, False, False), (2, True, False), (2, False, True), (None, True, True)]


def _matrix():
    for k, name in enumerate(zoo.ZOO):
        for j, backend in enumerate(("layerwise", "vectorized", "loop")):
            refused = zoo.NOT_LAYERWISE if backend == "layerwise" else zoo.NOT_VECTORIZED
            if backend == "loop" or name not in refused:
                for step in (0, 2) if backend == "layerwise" else (0,):
                    microbatch_size, static, jit = SETTINGS[(k + j + step) % 4]
                    if backend == "vectorized" and name in zoo.VECTORIZED_WITHOUT_XLA:
                        jit = False
                    yield name, backend, microbatch_size, static, jit


@pytest.mark.slow
@pytest.mark.parametrize("name, backend, microbatch_size, static_batch, jit_compile", [*_matrix()])
def test_matrix(name, backend, microbatch_size, static_batch, jit_compile):
    model = zoo.build(name)
    x, y = zoo.batch(model)
    optimizer = keras_dp.DPSGD(
        1.0,
        l2_norm_clip=_clip(model, x, y),
        noise_multiplier=0.0,
        batch_size=5,
        backend=backend,
        microbatch_size=microbatch_size,
    )
    checks.check_loop(model, optimizer, x, y, static_batch, jit_compile)


def _units(name, backend, microbatch_size=None, static_batch=False, jit_compile=False, **args):
    """LOOP with a clip per two rows: the mean of their gradients."""
    model = zoo.build(name)
    x, y = zoo.batch(model, 8)
    units = [[0, 1], [2, 3], [4, 5], [6, 7]]
    norms, _ = checks.plain_loop(model, x, y, 1.0, units=units)
    optimizer = keras_dp.DPSGD(
        1.0,
        l2_norm_clip=float(np.median(norms)),
        noise_multiplier=0.0,
        batch_size=4,
        backend=backend,
        microbatch_size=microbatch_size,
        examples_per_user=2,
        **args,
    )
    checks.check_loop(model, optimizer, x, y, static_batch, jit_compile, units=units)


# One model for every form in which gradients are held, the fallback, and rows that are folded.
FORMS = ["dense_positions", "dense_ghost", "conv2d", "text", "siamese", "scaled_dense"]


@pytest.mark.parametrize("name", FORMS)
def test_units_of_two_rows(name):
    _units(name, "layerwise")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, backend, microbatch_size, static_batch, jit_compile",
    [case for k, case in enumerate(_matrix()) if k % 5 == 0 and case[1] == "layerwise"],
)
def test_matrix_of_units(name, backend, microbatch_size, static_batch, jit_compile):
    """Every form and fallback, two rows a unit, each of them twice."""
    _units(name, backend, microbatch_size, static_batch, jit_compile, augmentations=2)
