"""Models that show which examples were in an update, and how often."""

import keras
import numpy as np


def witnessed(n, features=5, hidden=8):
    """A model with a weight for each example, which moves if the example is in an update.

    Inputs are features and the one-hot number of the example. The second output is the weight of
    that number; with the loss ``y_true * y_pred`` its gradient is 1.
    """
    x, example = keras.Input((features,)), keras.Input((n,))
    middle = keras.layers.Dense(hidden, activation="tanh")(x)
    logits = keras.layers.Dense(3, name="logits")(middle)
    witness = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="witness")(
        example
    )
    return keras.Model([x, example], [logits, witness])


LOSSES = [
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    lambda y_true, y_pred: keras.ops.mean(y_true * y_pred, -1),
]


def examples(n, features=5):
    """Features, one-hot numbers; classes, ones."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(n, features)).astype("float32")
    y = rng.integers(0, 3, n).astype("int32")
    return (x, np.eye(n, dtype="float32")), (y, np.ones((n, 1), "float32"))


class Witness(keras.callbacks.Callback):
    """Who was in each update: the witness weights that moved."""

    def on_train_begin(self, logs=None):
        """Begins a list."""
        self.weights, self.updates = [self._now()], [self._made()]

    def on_train_batch_end(self, batch, logs=None):
        """Notes weights and updates after each batch."""
        self.weights.append(self._now())
        self.updates.append(self._made())

    @property
    def present(self):
        """bool ``[updates, n]``."""
        made = np.flatnonzero(np.diff(self.updates)) + 1
        before = np.concatenate([[0], made[:-1]])
        return np.array([self.weights[k] != self.weights[b] for b, k in zip(before, made)])

    def _now(self):
        return self.model.get_layer("witness").kernel.numpy()[:, 0]

    def _made(self):
        return int(self.model.optimizer.iterations.numpy())
