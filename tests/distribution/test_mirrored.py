"""Without noise, an update under a mirrored strategy is that of one device."""

import functools

import keras
import numpy as np
import pytest
from keras import layers as L
from keras import optimizers as K

import keras_dp
from tests.distribution import running
from tests.fixtures import checks, zoo

PRIVACY = dict(l2_norm_clip=0.5, noise_multiplier=0.0, batch_size=8)


def _sgd(learning_rate=0.5, **kwargs):
    return keras_dp.DPSGD(learning_rate, **PRIVACY | kwargs)


OPTIMIZERS = {
    "sgd": _sgd,
    "schedule": lambda: _sgd(K.schedules.ExponentialDecay(0.5, 2, 0.5)),
    "ema": lambda: _sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "momentum": lambda: keras_dp.DPMomentum(0.5, momentum=0.9, nesterov=True, **PRIVACY),
    "adam": lambda: keras_dp.DPAdam(0.05, amsgrad=True, **PRIVACY),
    "bias_correction": lambda: keras_dp.DPAdam(
        0.05, noise_bias_correction=True, noise_bias_floor=1e-3, **PRIVACY
    ),
    "adamw": lambda: keras_dp.DPAdamW(0.05, weight_decay=0.1, **PRIVACY),
    "lamb": lambda: keras_dp.DPLamb(0.05, weight_decay=0.1, **PRIVACY),
} | {
    cls.__name__.lower(): lambda cls=cls, **kwargs: keras_dp.make_private(cls)(
        0.05, **PRIVACY | kwargs
    )
    for cls in (K.Nadam, K.Adamax, K.Adagrad, K.Adadelta, K.RMSprop, K.Ftrl, K.Lion, K.Adafactor)
}
OPTIMIZERS["muon"] = lambda: keras_dp.make_private(K.Muon)(0.05, weight_decay=0.1, **PRIVACY)

# Divides by the root of a second moment that is near zero for some weights.
LESS_EXACT = {"adafactor": 1e-3, "muon": 1e-3}

FAST = [("sgd", 4), ("lamb", 2)]
SLOW = [("sgd", 1), ("adamw", 4)] + [(name, 2) for name in OPTIMIZERS if (name, 2) not in FAST]


def _slow(cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@functools.cache
def _on_one_device(name):
    model = running.compiled(0, OPTIMIZERS[name])
    running.fit_unevenly(model)
    return model


@pytest.mark.parametrize("name, replicas", [*FAST, *_slow(SLOW)])
def test_optimizers(name, replicas):
    model = running.compiled(replicas, OPTIMIZERS[name])
    running.fit_unevenly(model)
    running.assert_same(model, _on_one_device(name), LESS_EXACT.get(name, 1e-5))
    running.assert_copies_agree(model)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_lin(replicas):
    with running.strategy(replicas).scope():
        checks.check_lin(keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0, batch_size=2))


VARIANTS = {
    "vectorized": dict(backend="vectorized"),
    "loop": dict(backend="loop"),
    "microbatches": dict(microbatch_size=2),
    "augmentations": dict(augmentations=2),  # no layer of the model is random
}
COMPILED = {
    "eager": dict(run_eagerly=True),
    "several steps an execution": dict(steps_per_execution=2),
    "jit": dict(jit_compile=True),
}


def _few_slow(cases, fast):
    slow = pytest.mark.slow
    return [pytest.param(c, id=c, marks=() if c in fast else slow) for c in cases]


@pytest.mark.parametrize("variant", _few_slow(VARIANTS, ["vectorized"]))
def test_ways_to_the_clipped_sum(variant):
    model = running.compiled(2, lambda: _sgd(**VARIANTS[variant]))
    running.fit_unevenly(model)
    running.assert_same(model, _on_one_device("sgd"))


def test_jit_compile():
    """LIN; uneven shares, of which XLA compiles each size anew, are below."""
    with running.strategy(2).scope():
        optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0, batch_size=2)
        checks.check_lin(optimizer, jit_compile=True)


# What the loop makes of a share without a row XLA does not compile.
WAYS = [("eager", v) for v in VARIANTS] + [("jit", v) for v in (None, "vectorized", "microbatches")]
FAST_WAYS = [("eager", None), ("several steps an execution", None)]


@pytest.mark.parametrize("how, variant", [*FAST_WAYS, *_slow(WAYS)])
def test_ways_to_compile(how, variant):
    model = running.compiled(2, lambda: _sgd(**VARIANTS.get(variant, {})), **COMPILED[how])
    running.fit_unevenly(model)
    running.assert_same(model, _on_one_device("sgd"))


def all_kinds():
    """A layer of every kind on the way from three inputs to one output."""
    image = keras.Input((6, 6, 2), name="image")
    ids = keras.Input((5,), dtype="int32", name="ids")
    series = keras.Input((4, 3), name="series")
    x = L.GroupNormalization(2)(L.Conv2D(4, 3, activation="relu")(image))
    t = L.Embedding(zoo.VOCABULARY, 4)(ids)
    t = t + L.MultiHeadAttention(2, 2)(L.LayerNormalization()(t), t)
    parts = [L.Flatten()(x), L.Flatten()(zoo.Position()(t)), L.LSTM(3)(series)]
    return keras.Model([image, ids, series], L.Dense(zoo.CLASSES)(L.Concatenate()(parts)))


def _all_kinds_trained(replicas, **compile_args):
    rng = np.random.default_rng(0)
    x = [
        rng.normal(size=(9, 6, 6, 2)).astype("float32"),
        rng.integers(0, zoo.VOCABULARY, (9, 5)).astype("int32"),
        rng.normal(size=(9, 4, 3)).astype("float32"),
    ]
    model = running.compiled(replicas, _sgd, all_kinds, **compile_args)
    y = rng.integers(0, zoo.CLASSES, 9)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers(jit_compile):
    """The second batch, of one example, leaves a replica without a row."""
    model = _all_kinds_trained(2, jit_compile=jit_compile)
    running.assert_same(model, _all_kinds_trained(0))
    running.assert_copies_agree(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv3d", "einsum", "gru", "lora", "tied"])
def test_zoo(name):
    models = [running.compiled(n, _sgd, name) for n in (2, 0)]
    for model in models:
        running.fit_unevenly(model, size=9, epochs=1)
    running.assert_same(*models)


def _constrained():
    kwargs = dict(
        kernel_constraint=keras.constraints.MaxNorm(0.8),
        kernel_regularizer=keras.regularizers.L2(0.1),
        activity_regularizer=keras.regularizers.L2(0.01),
    )
    return keras.Sequential([keras.Input((4,)), L.Dense(5, "tanh", **kwargs), L.Dense(3)])


MORE = {
    "constraints and regularizers": (_constrained, {}),
    "automatic clipping": ("dense", dict(clipping="automatic")),
    "accumulation": ("dense", dict(gradient_accumulation_steps=2)),
}


@pytest.mark.parametrize("case", _few_slow(MORE, ["accumulation"]))
def test_more(case):
    """Accumulated updates of two batches of three go on over the ends of the epochs."""
    make_model, kwargs = MORE[case]
    models = [running.compiled(n, lambda: _sgd(**kwargs), make_model) for n in (2, 0)]
    for model in models:
        running.fit_unevenly(model)
    running.assert_same(*models)
    running.assert_copies_agree(models[0])


def test_float16():
    """Keras wraps the optimizer for losses that it scales."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        models = [running.compiled(n, _sgd) for n in (2, 0)]
        for model in models:
            assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            running.fit_unevenly(model, epochs=1)
    finally:
        keras.config.set_dtype_policy("float32")
    running.assert_same(*models, tolerance=2e-3)
    running.assert_copies_agree(models[0])
