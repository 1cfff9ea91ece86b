"""NOISE: the right size, once, independent, and in every entry point."""

import numpy as np
import pytest

import keras_dp
from tests.fixtures import checks


def _make(**kwargs):
    args = dict(l2_norm_clip=0.5, noise_multiplier=2.0, batch_size=4) | kwargs
    return lambda: keras_dp.DPSGD(1.0, **args)


@pytest.mark.parametrize("entry", checks.ENTRY_POINTS)
def test_entry_points(entry):
    checks.check_noise(_make(), 2.0 * 0.5 / 4, checks.ENTRY_POINTS[entry])


@pytest.mark.parametrize(
    "compile_args",
    [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    ids=str,
)
def test_compile_arguments(compile_args):
    checks.check_noise(_make(), 2.0 * 0.5 / 4, **compile_args)


@pytest.mark.parametrize(
    "args",
    [
        {"microbatch_size": 1},
        {"clipping": "automatic"},
        {"backend": "vectorized"},
        {"backend": "loop"},
        {"batch_size": 256},
        {"l2_norm_clip": 3.0},
        {"augmentations": 2},
        {"examples_per_user": 2},
        {"noise_source": "secure"},
    ],
    ids=str,
)
def test_arguments(args):
    if args.get("noise_source") == "secure":
        pytest.importorskip("cryptography")
    optimizer = _make(**args)()
    stddev = 2.0 * optimizer.l2_norm_clip / optimizer.batch_size
    checks.check_noise(_make(**args), stddev)


def test_rows_that_never_get_a_gradient_get_noise():
    """Rows of an embedding table that no example reads are noised like the others."""
    import keras

    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(2000, 64)])
    model.compile(_make(noise_multiplier=1.0)(), loss="mse")
    before = model.get_weights()[0]
    checks.fit(model, np.full((4, 3), 7, "int32"), np.zeros((4, 3, 64), "float32"))
    untouched = np.delete(model.get_weights()[0] - before, 7, axis=0)
    np.testing.assert_allclose(np.std(untouched), 0.5 / 4, rtol=0.01)


def test_a_layer_that_the_loss_ignores_gets_noise():
    from tests.fixtures import zoo

    model = zoo.build("unused_branch")
    model.compile(_make()(), loss="sparse_categorical_crossentropy")
    idle = next(layer for layer in model.layers if getattr(layer, "units", 0) == 7)
    before = idle.get_weights()[0]
    x, y = zoo.batch(model)
    checks.fit(model, x, y)
    assert np.all(idle.get_weights()[0] != before)


def test_two_optimizers_share_no_noise():
    first, second = (
        np.concatenate([k.ravel() for k in checks.noise_steps(_make(), steps=1)[0]])
        for _ in range(2)
    )
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(first.size)
