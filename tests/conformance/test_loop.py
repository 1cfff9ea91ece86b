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


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("static_batch", [False, True])
@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("backend", ["layerwise", "vectorized", "loop"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_matrix(name, backend, microbatch_size, static_batch, jit_compile):
    if backend == "layerwise" and name in zoo.NOT_LAYERWISE:
        pytest.skip("refused by name: tests/clipping/test_gradients.py")
    if backend == "vectorized" and name in zoo.NOT_VECTORIZED:
        pytest.skip("refused by name: tests/clipping/test_gradients.py")
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
