"""The per-layer fallback: which rows of a layer's arguments belong to which example."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp

L = keras.layers
SIZE = 8


class ByTable(L.Layer):
    """Scales every example by the mean of a table."""

    def build(self, shape):
        self.w = self.add_weight(shape=(3,), name="w", initializer="ones")

    def call(self, x, table):
        return x * self.w * keras.ops.mean(table)


class WithTable(keras.Model):
    """The table is as long as the batch, and belongs to all examples."""

    def __init__(self, as_list):
        super().__init__()
        self.layer, self.as_list = (FromList() if as_list else ByTable()), as_list
        self.table = tf.reshape(tf.range(1.0, SIZE + 1), [SIZE, 1])

    def call(self, x):
        return self.layer([x, self.table]) if self.as_list else self.layer(x, self.table)


class FromList(ByTable):
    """The same, called on one list."""

    def call(self, both):
        return super().call(*both)


class Turned(L.Layer):
    """Called on [time, batch, features], gives [batch, features]."""

    def build(self, shape):
        self.w = self.add_weight(shape=shape[-1:], name="w", initializer="ones")

    def call(self, x):
        return keras.ops.sum(x * self.w, 0)


class TimeMajor(keras.Model):
    """As many times as examples, so that the shapes do not tell."""

    def __init__(self):
        super().__init__()
        self.layer = Turned()

    def call(self, x):
        return self.layer(keras.ops.transpose(x, (1, 0, 2)))


def sums(model, x, backend):
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=SIZE, backend=backend
    )
    model.compile(optimizer, lambda y, y_pred: keras.ops.sum(keras.ops.sin(y_pred) * y))
    y = np.ones((SIZE, 3), np.float32)
    return keras_dp.clipped_gradients(model, x, y, optimizer=optimizer).sums[0].numpy()


@pytest.mark.filterwarnings("ignore:keras_dp. model:UserWarning")
@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: WithTable(False), (SIZE, 3)),
        (lambda: WithTable(True), (SIZE, 3)),
        (TimeMajor, (SIZE, SIZE, 3)),
    ],
    ids=["table", "table in a list", "time first"],
)
def test_what_is_as_long_as_the_batch(make, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    model = make()
    model(x)
    np.testing.assert_allclose(sums(model, x, "auto"), sums(model, x, "loop"), rtol=1e-4, atol=1e-5)


def test_layerwise_by_name_says_so():
    x = np.ones((SIZE, 3), np.float32)
    model = WithTable(False)
    model(x)
    with pytest.raises(keras_dp.IncompatibleModelError, match="as long as the batch"):
        sums(model, x, "layerwise")
