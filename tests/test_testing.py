"""``check_rule`` accepts what is right and catches what is wrong; rules of one's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from keras_dp import rules, testing
from keras_dp.clipping import rules as engine


@pytest.fixture
def register(monkeypatch):
    """``register_rule`` whose rules go when the test ends."""
    monkeypatch.setattr(engine, "_RULES", dict(engine._RULES))
    return keras_dp.register_rule


class Scale(L.Layer):
    """z = activation(x * w)."""

    def __init__(self, activation=None, **kwargs):
        super().__init__(**kwargs)
        self.activation = keras.activations.get(activation) if activation else None

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        z = x * self.w
        return z if self.activation is None else self.activation(z)


def right(use, g):
    values = use.input * g
    yield use.layer.w, rules.PerExample(_positions_added(values), use.layer.w.shape)


def _positions_added(values):
    return tf.reduce_sum(values, range(1, values.shape.rank - 1))


@pytest.mark.parametrize("shape", [(4,), (6, 4)])
@pytest.mark.parametrize("activation", [None, "tanh"])
def test_a_rule_of_ones_own(register, shape, activation):
    """Watched by default is what the activation is applied to."""
    assert register(Scale)(right) is right
    layer = Scale(activation)
    assert engine.rule_for(layer).forms is right
    testing.check_rule(layer, shape)


@pytest.mark.parametrize("shape", [(4,), (6, 4)])
def test_without_a_rule(shape):
    layer = Scale("tanh")
    assert engine.rule_for(layer) is None
    testing.check_rule(layer, shape)


def test_a_subclass_has_no_rule(register):
    register(Scale)(right)

    class Twice(Scale):
        def call(self, x):
            return 2 * super().call(x)

    assert engine.rule_for(Twice()) is None
    testing.check_rule(Twice(), (4,))


def _wrong_factor(use, g):
    yield use.layer.w, rules.PerExample(1.01 * _positions_added(use.input * g), use.layer.w.shape)


def _norms_added(use, g):
    class Wrong(rules.PerExample):
        def squared_norms(self):
            return super().squared_norms() * 1.001

    yield use.layer.w, Wrong(_positions_added(use.input * g), use.layer.w.shape)


def _sum_off(use, g):
    class Wrong(rules.PerExample):
        def weighted_sum(self, factors, tensors):
            return super().weighted_sum(factors, tensors) * 1.001

    yield use.layer.w, Wrong(_positions_added(use.input * g), use.layer.w.shape)


def _no_weight(use, g):
    yield from ()


def _rows_mixed(use, g):
    values = _positions_added(use.input * tf.reverse(g, [0]))
    yield use.layer.w, rules.PerExample(values, use.layer.w.shape)


def _fixed_batch(use, g):
    values = _positions_added(use.input * g)
    yield use.layer.w, rules.PerExample(tf.reshape(values, [5, -1])[:5], use.layer.w.shape)


def _not_finite_rows(use, g):
    """Right, until the sum multiplies what is not finite by 0."""

    class Wrong(rules.PerExample):
        def tensors(self):
            return []

        def weighted_sum(self, factors, tensors):
            return super().weighted_sum(factors, [self.values])

    yield use.layer.w, Wrong(_positions_added(use.input * g), use.layer.w.shape)


@pytest.mark.parametrize(
    "rule, message",
    [
        (_wrong_factor, r"'.*scale.*/w.*|.*variable.*': the gradient norm of example"),
        (_norms_added, "the gradient norm of example"),
        (_sum_off, "an entry of the clipped sum is off by"),
        (_no_weight, "the gradient norm of example . is 0 and has to be"),
        (_rows_mixed, "the gradient norm of example"),
        (_not_finite_rows, "moves the clipped sum by nan"),
    ],
)
def test_wrong_rules_are_caught(register, rule, message):
    register(Scale)(rule)
    with pytest.raises(AssertionError, match=message) as caught:
        testing.check_rule(Scale(), (6, 4))
    assert "(Scale)" in str(caught.value)


def test_a_rule_for_one_batch_size_is_caught(register):
    """It breaks in microbatches."""
    register(Scale)(_fixed_batch)
    with pytest.raises((AssertionError, ValueError, tf.errors.InvalidArgumentError)):
        testing.check_rule(Scale(), (6, 4))


def test_what_is_watched_behind_the_activation_is_caught(register):
    register(Scale, record=lambda use, call, watch: watch(call(*use.args, **use.kwargs)))(right)
    testing.check_rule(Scale(), (6, 4))
    with pytest.raises(AssertionError, match="gradient norm"):
        testing.check_rule(Scale("tanh"), (6, 4))


def test_a_record_that_cuts_the_layers_before_it_off_is_caught(register):
    def record(use, call, watch):
        return watch(call(tf.stop_gradient(use.input)))

    register(Scale, record=record)(right)
    with pytest.raises(AssertionError, match="dense.*the gradient norm"):
        testing.check_rule(Scale(), (6, 4))


class EmbeddingBag(L.Layer):
    """The sum of the rows that an example names, each times a number of its own."""

    def __init__(self, input_dim, depth, **kwargs):
        super().__init__(**kwargs)
        self.input_dim, self.depth = input_dim, depth

    def build(self, shape):
        self.table = self.add_weight(shape=(self.input_dim, self.depth), initializer="uniform")
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, ids):
        return self.scale * keras.ops.sum(keras.ops.take(self.table, ids, 0), -2)


def _record_bag(use, call, watch):
    """Watches the rows before they are scaled, and what they add up to."""
    layer = use.layer
    use.saved = watch(keras.ops.sum(keras.ops.take(layer.table, use.input, 0), -2))
    return watch(layer.scale * use.saved)


def _bag(use, of_rows, of_outputs):
    layer = use.layer
    g = tf.repeat(of_rows[:, None], use.input.shape[1], 1)
    yield layer.table, rules.Rows(use.input, g, layer.table.shape)
    values = tf.reduce_sum(of_outputs * use.saved, -1)
    yield layer.scale, rules.PerExample(values, ())


@pytest.mark.parametrize("with_rule", [False, True])
def test_embedding_bag(register, with_rule):
    """A layer with two watched tensors and a form of each kind."""
    if with_rule:
        register(EmbeddingBag, record=_record_bag)(_bag)
    layer = EmbeddingBag(9, 4)
    assert (engine.rule_for(layer) is not None) == with_rule
    testing.check_rule(layer, (6,), dtype="int32")


class TiedAutoencoder(L.Layer):
    """A square kernel, and its transpose when called with ``back=True``."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer="glorot_uniform")

    def call(self, x, back=False):
        return x @ (keras.ops.transpose(self.kernel) if back else self.kernel)


class There(L.Layer):
    """There and back again."""

    def __init__(self):
        super().__init__()
        self.tied = TiedAutoencoder()

    def build(self, shape):
        self.tied.build(shape)

    def call(self, x):
        return self.tied(keras.ops.tanh(self.tied(x)), back=True)


def test_two_uses_in_two_layouts(register):
    def tied(use, g):
        if use.kwargs.get("back", False):
            yield (
                use.layer.kernel,
                rules.Product(
                    use.input[:, None],
                    g[:, None],
                    use.layer.kernel.shape,
                    rules.Layout(use.layer.kernel.shape[::-1], (1, 0)),
                ),
            )
        else:
            yield (
                use.layer.kernel,
                rules.Product(
                    use.input[:, None],
                    g[:, None],
                    use.layer.kernel.shape,
                ),
            )

    register(TiedAutoencoder)(tied)
    testing.check_rule(There(), (6, 4))


@pytest.mark.parametrize("received", [3, "Dense", Scale(), keras.Variable, None])
def test_only_layer_classes_have_rules(received):
    with pytest.raises(ValueError, match="subclass of keras.layers.Layer.*Received"):
        keras_dp.register_rule(received)


@pytest.mark.parametrize("received", [L.Dense, L.Layer, keras.Model])
def test_layers_of_keras_are_refused(received):
    with pytest.raises(ValueError, match=f"received keras.layers.{received.__name__}"):
        keras_dp.register_rule(received)


def test_the_layer_is_as_before():
    layer = L.Dense(3)
    layer.build((None, 4))
    before = layer.get_weights()
    testing.check_rule(layer, (4,))
    for a, b in zip(before, layer.get_weights()):
        np.testing.assert_array_equal(a, b)
    assert "call" not in layer.__dict__


def test_what_cannot_be_checked():
    with pytest.raises(ValueError, match="no trainable weights"):
        testing.check_rule(L.ReLU(), (4,))
    with pytest.raises(ValueError, match="draws\n?.*random numbers"):
        testing.check_rule(L.Attention(use_scale=True, dropout=0.5), [(3, 4), (3, 4)])
    with pytest.raises(ValueError, match="batch_size.*Received: 1"):
        testing.check_rule(L.Dense(3), (4,), batch_size=1)


def test_testing_imports_no_pytest():
    import pathlib

    assert "pytest" not in pathlib.Path(testing.__file__).read_text()
