"""The DP optimizers: arguments, serialization, secrets, and the numbers of others."""

import inspect
import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.clipping.clipped import ClippedGradients
from keras_dp.noise import GaussianNoise
from tests.fixtures import checks, zoo

PRIVATE = dict(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4)
CLASSES = [
    keras_dp.DPSGD,
    keras_dp.DPMomentum,
    keras_dp.DPAdam,
    keras_dp.DPAdamW,
    keras_dp.DPLamb,
]
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize("cls", CLASSES)
def test_signature_shows_every_argument(cls):
    names = list(inspect.signature(cls).parameters)
    assert {"learning_rate", "weight_decay", "use_ema", *PRIVATE, "seed", "backend"} <= set(names)


@pytest.mark.parametrize(
    "bad",
    [
        {"l2_norm_clip": 0},
        {"l2_norm_clip": -1.0},
        {"l2_norm_clip": float("nan")},
        {"l2_norm_clip": float("inf")},
        {"l2_norm_clip": "1"},
        {"l2_norm_clip": True},
        {"noise_multiplier": -0.1},
        {"noise_multiplier": float("nan")},
        {"noise_multiplier": float("inf")},
        {"noise_multiplier": None},
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"batch_size": True},
        {"microbatch_size": 0},
        {"clipping": "per_layer"},
        {"backend": "fast"},
        {"gradient_accumulation_steps": 0},
        {"gradient_accumulation_steps": 2.0},
        {"augmentations": 0},
        {"augmentations": True},
        {"examples_per_user": -1},
        {"examples_per_user": "2"},
        {"seed": 1.5},
    ],
    ids=str,
)
def test_bad_arguments(bad):
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{name} must be .*Received: {name}=") as error:
        keras_dp.DPSGD(0.1, **(PRIVATE | bad))
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("missing", PRIVATE)
def test_private_arguments_have_no_default(missing):
    with pytest.raises(TypeError, match=missing):
        keras_dp.DPSGD(0.1, **{k: v for k, v in PRIVATE.items() if k != missing})


@pytest.mark.parametrize(
    "args",
    [
        {"clipnorm": 1.0},
        {"clipvalue": 0.5},
        {"global_clipnorm": 1.0},
        {"loss_scale_factor": 8.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", CLASSES)
def test_arguments_of_keras_that_would_break_the_guarantee(cls, args):
    (name, value), *_ = args.items()
    with pytest.raises(ValueError, match=f"{cls.__name__} received {name}={value}"):
        cls(**PRIVATE, **args)


def test_settings_cannot_be_changed():
    optimizer = keras_dp.DPSGD(0.1, **PRIVATE)
    for name in PRIVATE:
        with pytest.raises(AttributeError):
            setattr(optimizer, name, 2)


@pytest.mark.parametrize("cls", CLASSES)
def test_config_round_trip(cls):
    args = dict(
        l2_norm_clip=0.7,
        noise_multiplier=1.3,
        batch_size=5,
        clipping="automatic",
        microbatch_size=2,
        backend="vectorized",
        gradient_accumulation_steps=3,
        augmentations=2,
        examples_per_user=4,
    )
    config = cls(learning_rate=0.03, weight_decay=0.01, **args).get_config()
    json.dumps(config)
    again = cls.from_config(config)
    assert again.get_config() == config
    for name, value in args.items():
        assert getattr(again, name) == value
    deserialized = keras.optimizers.deserialize(keras.optimizers.serialize(again))
    assert type(deserialized) is cls
    assert deserialized.get_config() == config


def test_lamb_and_adam_arguments_round_trip():
    lamb = keras_dp.DPLamb(
        0.1,
        exclude_from_weight_decay=["bias"],
        exclude_from_layer_adaptation=["gamma"],
        noise_bias_correction=True,
        noise_bias_floor=1e-6,
        **PRIVATE,
    )
    config = keras_dp.DPLamb.from_config(lamb.get_config()).get_config()
    assert config["exclude_from_weight_decay"] == ["bias"]
    assert config["exclude_from_layer_adaptation"] == ["gamma"]
    assert config["noise_bias_correction"] is True
    assert config["noise_bias_floor"] == 1e-6


@pytest.mark.parametrize("cls", CLASSES)
def test_save_and_load(cls, tmp_path):
    model = zoo.build("dense")
    model.compile(cls(learning_rate=0.01, microbatch_size=2, **PRIVATE), loss=CROSSENTROPY)
    x, y = zoo.batch(model)
    model.fit(x, y, verbose=0, epochs=2)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is cls
    assert loaded.optimizer.privacy == model.optimizer.privacy
    assert int(loaded.optimizer.iterations) == 2
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables):
        np.testing.assert_array_equal(a, b)


def test_the_secret_is_in_no_file(tmp_path):
    """Neither the run's secret nor a test's seed is in a saved model, a config or a repr."""
    with pytest.warns(UserWarning, match="NOT private"):
        optimizer = keras_dp.DPSGD(0.1, seed=987654321, **PRIVATE)
    model = zoo.build("dense")
    model.compile(optimizer, loss=CROSSENTROPY)
    x, y = zoo.batch(model)
    log = tmp_path / "log"
    model.fit(x, y, verbose=0, callbacks=[keras.callbacks.TensorBoard(log, write_graph=True)])
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "checkpoint")
    secret = optimizer._noise._secret.numpy()
    needles = [secret.tobytes(), *(s.tobytes() for s in secret), *(str(s).encode() for s in secret)]
    needles.append(b"987654321")
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(written) > 4
    texts = [p.read_bytes() for p in written]
    texts += [repr(optimizer).encode(), json.dumps(optimizer.get_config()).encode()]
    for text in texts:
        assert not any(needle in text for needle in needles)


def test_state_set_back_does_not_repeat_noise():
    """Weights and counter restored in the same run: the noise is new all the same."""
    model = zoo.build("dense")
    model.compile(keras_dp.DPSGD(0.1, **PRIVATE), loss=CROSSENTROPY)
    x, y = zoo.batch(model)
    model.train_on_batch(x, y)
    weights = model.get_weights()
    state = [v.numpy() for v in model.optimizer.variables]
    steps = []
    for _ in range(2):
        model.set_weights(weights)
        model.optimizer.set_weights(state)
        model.train_on_batch(x, y)
        steps.append(model.get_weights()[0] - weights[0])
    assert np.all(steps[0] != steps[1])


@pytest.mark.filterwarnings("ignore:keras_dp. seed=1 fixes the noise")
@pytest.mark.parametrize("cls", [*CLASSES, keras_dp.make_private(keras.optimizers.Nadam)])
def test_every_class_gets_the_same_private_gradient(cls):
    """LIN's clipped mean, and with noise the same noise: what differs is post-processing."""
    gradients = []
    for noise_multiplier in (0.0, 1.0):
        optimizer = cls(
            learning_rate=0.1,
            l2_norm_clip=1.0,
            noise_multiplier=noise_multiplier,
            batch_size=2,
            seed=1,
        )
        model = checks.linear_model(optimizer)
        gradients.append(checks.private_gradient(model, checks.LIN_X, checks.LIN_Y))
    np.testing.assert_allclose(gradients[0], checks.LIN_STEP, atol=2e-6)
    with pytest.warns(UserWarning, match="NOT private"):
        normals = np.ravel(GaussianNoise(seed=1).draw([(2, 1)], 1.0)[0])
    np.testing.assert_allclose(gradients[1], checks.LIN_STEP + normals / 2, atol=2e-6)


# make_private ------------------------------------------------------------------------------


def test_make_private_is_cached_and_named():
    cls = keras_dp.make_private(keras.optimizers.Nadam)
    assert cls is keras_dp.make_private(keras.optimizers.Nadam)
    assert cls.__name__ == "DPNadam"


@pytest.mark.parametrize(
    "bad", [object, "sgd", keras_dp.DPSGD, keras.optimizers.LossScaleOptimizer], ids=str
)
def test_make_private_refuses(bad):
    with pytest.raises(ValueError, match="make_private"):
        keras_dp.make_private(bad)


# The numbers of others ---------------------------------------------------------------------


def _golden(name):
    return json.loads((pathlib.Path(__file__).parent / name).read_text())


LAMB = _golden("lamb_golden.json")


@pytest.mark.parametrize("case", LAMB["cases"], ids=lambda c: c["name"])
def test_lamb_equals_tensorflow_addons(case):
    """Ten steps of DPLamb without noise; where the numbers come from is in the file."""
    args = {"epsilon": 1e-6} | case["arguments"]  # what TF Addons has by default
    optimizer = keras_dp.DPLamb(l2_norm_clip=1e30, noise_multiplier=0.0, batch_size=4, **args)
    variables = []
    for spec in LAMB["variables"]:
        scope, _, name = spec["name"].rpartition("/")
        value = np.float32(spec["initial"]).reshape(spec["shape"])
        with keras.name_scope(scope or "root"):
            variables.append(keras.Variable(value, name=name))
    for step, gradients in enumerate(LAMB["gradients"][case["gradients"]]):
        scaled = [np.float32(g).reshape(v.shape) for g, v in zip(gradients, variables)]
        scaled = [tf.constant(s) for s in scaled]
        optimizer.apply_gradients(
            ClippedGradients(scaled, variables, tf.constant(0.0), tf.constant(4), optimizer)
        )
        for spec, variable, want in zip(LAMB["variables"], variables, case["after"][step]):
            np.testing.assert_allclose(
                np.ravel(variable), want, rtol=2e-5, atol=2e-6, err_msg=f"{spec['name']} {step}"
            )


TFP = _golden("tfp_golden.json")


@pytest.mark.parametrize("name", TFP["cases"])
@pytest.mark.parametrize("backend", ["layerwise", "vectorized", "loop"])
def test_clipping_equals_tensorflow_privacy(name, backend):
    case = TFP["cases"][name]
    layers = [keras.layers.Dense(1, use_bias=False)]
    loss = lambda y, p: y * p  # noqa: E731
    if name == "mlp":
        layers, loss = [keras.layers.Dense(7, "tanh"), keras.layers.Dense(3)], "mse"
    x, y = np.float32(case["x"]), np.float32(case["y"])
    model = keras.Sequential([keras.Input(x.shape[1:]), *layers])
    for variable, value, shape in zip(model.weights, case["weights"], case["shapes"]):
        variable.assign(np.reshape(value, shape))
    for result in case["results"]:
        optimizer = keras_dp.DPSGD(
            1.0,
            l2_norm_clip=result["l2_norm_clip"],
            noise_multiplier=0.0,
            batch_size=len(x),
            backend=backend,
        )
        model.compile(optimizer, loss=loss)
        clipped = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer)
        gradients = optimizer._privatized(clipped.scaled_sums, clipped.variables)
        for got, want in zip(gradients, result["gradients"]):
            np.testing.assert_allclose(np.ravel(got), want, rtol=2e-5, atol=2e-6)


# The noise's bias in Adam's second moment --------------------------------------------------


@pytest.mark.parametrize("cls", [keras_dp.DPAdam, keras_dp.DPAdamW, keras_dp.DPLamb])
def test_noise_bias_correction(cls):
    """With gradients of pure noise, v_hat - Phi is near zero, so the floor decides the step."""
    seen = {}
    for corrected in (False, True):
        optimizer = cls(
            learning_rate=1.0,
            l2_norm_clip=2.0,
            noise_multiplier=3.0,
            batch_size=10,
            noise_bias_correction=corrected,
            noise_bias_floor=1e-3,
        )
        phi = (3.0 * 2.0 / 10) ** 2
        assert optimizer.noise_stddev**2 == pytest.approx(phi)
        variable = keras.Variable(np.zeros(20000, "float32"))
        optimizer.build([variable])
        rng = np.random.default_rng(0)
        for _ in range(200):
            gradient = rng.normal(0, np.sqrt(phi), 20000).astype("float32")
            direction = optimizer.direction(gradient, variable)
            optimizer.iterations.assign_add(1)
        seen[corrected] = np.asarray(direction)
        v_hat = np.asarray(optimizer._velocities[0]) / (1 - 0.999**200)
        assert np.mean(v_hat) == pytest.approx(phi, rel=0.01)
    m_hat = np.asarray(optimizer._momentums[0]) / (1 - 0.9**200)
    want = m_hat / np.sqrt(np.maximum(v_hat - phi, 1e-3))
    # float32 powers of 0.999 leave 1e-4 in v_hat, and its difference to phi is small.
    np.testing.assert_allclose(seen[True], want, rtol=1e-2, atol=1e-4)
    assert np.std(seen[True]) > 2 * np.std(seen[False])


def test_noise_bias_arguments():
    for bad in ({"noise_bias_correction": 1}, {"noise_bias_floor": 0.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            keras_dp.DPAdam(0.1, **PRIVATE, **bad)
    with pytest.raises(ValueError, match="amsgrad"):
        keras_dp.DPAdam(0.1, amsgrad=True, noise_bias_correction=True, **PRIVATE)
