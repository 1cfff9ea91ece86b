"""Tells when Keras changes one of the names in keras_dp/_keras.py that are not public."""

import inspect

import keras
import numpy as np
import pytest

from keras_dp import _keras
from keras_dp.optimizers.base import private_optimizer


def _model():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(3)(inputs))
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    return keras.Model(inputs, inner(hidden))


def test_the_trainer_of_every_model():
    assert issubclass(keras.Model, _keras.TensorFlowTrainer)
    source = inspect.getsource(_keras.TensorFlowTrainer._make_function)
    assert "step_function" in source
    for name in ("_compute_loss", "_symbolic_build"):
        assert callable(getattr(keras.Model, name))


def test_the_step_is_looked_up_on_the_class():
    """``fit`` has to reach a train_step that was put on the class after the model was made."""
    model, seen = _model(), []
    model.compile("sgd", "mse")
    original = _keras.TensorFlowTrainer.train_step

    def step(self, data):
        seen.append(self)
        return original(self, data)

    _keras.TensorFlowTrainer.train_step = step
    try:
        model.fit(np.ones((2, 4)), np.ones((2, 2)), verbose=0)
    finally:
        _keras.TensorFlowTrainer.train_step = original
    assert seen


def test_layers_weights_and_seeds():
    model = _model()
    layers = _keras.all_layers(model)
    assert layers[0] is model
    assert sum(isinstance(layer, keras.layers.Dense) for layer in layers) == 2
    owned = [v for layer in layers for v in _keras.own_trainable_variables(layer)]
    assert {id(v) for v in owned} == {id(v) for v in model.trainable_variables}
    _keras.make_shared_seed_generator()
    assert len(_keras.seed_generators(model)) == 2  # the dropout's and the shared one
    model.layers[1].trainable = False
    assert _keras.own_trainable_variables(model.layers[1]) == []


def test_calls_go_through_the_instance():
    """The recording replaces ``call`` and ``activation`` on the instance."""
    layer, seen = keras.layers.Dense(2, activation="relu"), []
    layer.build((None, 3))
    plain = layer.call
    object.__setattr__(layer, "call", lambda *a, **k: seen.append("call") or plain(*a, **k))
    activation = layer.activation
    object.__setattr__(layer, "activation", lambda z: seen.append("z") or activation(z))
    layer(np.ones((1, 3)))
    assert seen == ["call", "z"]


def test_stateless_scopes_hold_back_assignments():
    variable = keras.Variable(1.0)
    with keras.StatelessScope() as scope:
        variable.assign(2.0)
    assert float(variable) == 1.0
    assert float(scope.get_current_value(variable)) == 2.0


def test_arguments_that_a_wrapper_may_hand_on():
    both = dict(training=True, mask=1)
    assert _keras.accepted(keras.layers.LSTM(2), **both) == both
    assert _keras.accepted(keras.layers.Dropout(0.1), **both) == {"training": True}
    assert _keras.accepted(keras.layers.Flatten(), **both) == {}
    assert _keras.accepted(keras.layers.LSTM(2), training=None, mask=None) == {"training": None}


def test_the_loop_of_recurrent_layers():
    """The recording calls it with a cell and with flags of its own."""
    layer = keras.layers.LSTM(2)
    layer.build((None, 3, 1))
    z, state = np.ones((1, 3, 2), "float32"), [np.zeros((1, 2), "float32")]
    names = dict(cell=lambda z, s: (z + s[0], [z + s[0]]), return_sequences=True)
    for name, value in names.items():
        object.__setattr__(layer, name, value)
    last, outputs, states = keras.layers.RNN.inner_loop(layer, z, state, None)
    np.testing.assert_array_equal(outputs[0, :, 0], [1, 2, 3])
    np.testing.assert_array_equal(last, states[0])


def test_masks_are_an_attribute():
    layer = keras.layers.Embedding(3, 2, mask_zero=True)
    assert _keras.get_mask(layer(np.array([[0, 1]]))) is not None


def test_loss_and_trackers():
    model = _model()
    model.compile("sgd", "mse")
    assert not model._compile_loss.built
    _keras.build(model, np.ones((2, 4), "float32"), np.ones((2, 2), "float32"), None)
    assert model._compile_loss.built
    loss = _keras.batch_loss(model, None, np.ones((2, 2)), np.zeros((2, 2), "float32"), None)
    assert float(loss) == 1.0
    _keras.track_loss(model, loss, 2)
    assert float(model.get_metrics_result()["loss"]) == 1.0


def test_compute_loss_is_found():
    class Own(keras.Model):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    assert _keras.overrides_compute_loss(Own())
    assert not _keras.overrides_compute_loss(_model())


def test_float16_models_get_a_wrapped_optimizer():
    """Keras wraps at compile; the private optimizer is found inside."""
    import keras_dp

    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = _model()
        optimizer = keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=2)
        model.compile(optimizer, "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert private_optimizer(model) is optimizer


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_plain_models_have_no_private_optimizer(optimizer):
    model = _model()
    if optimizer:
        model.compile(optimizer, "mse")
    assert private_optimizer(model) is None


def test_examples_behind_the_logged_loss_are_counted():
    model = _model()
    model.compile("sgd", loss="mse")
    rows = np.zeros((7, 4), "float32")
    y = np.zeros(model(rows).shape, "float32")
    model.fit(rows, y, batch_size=3, epochs=2, verbose=0)
    assert _keras.examples_tracked(model) == 7
