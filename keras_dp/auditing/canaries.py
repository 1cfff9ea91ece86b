"""Canaries: the examples that an audit puts in or leaves out, and how each is scored.

A canary that is left out stays in the data set with the weight 0, by which the private step leaves
its gradient out. So the number of examples and the sampling probability are the same in both
worlds: the neighbouring relation is "zero_out", which costs as much as "add_remove".
"""

import keras
import numpy as np
import tensorflow as tf

from keras_dp import _keras
from keras_dp.clipping import rows
from keras_dp.clipping.example_loss import loss_of

# Gradients of the worst case are this many times as long as the clip allows.
_LENGTH = 1e3
_ROWS_AT_ONCE = 32


class WorstCase:
    """Canaries whose gradients are as long as the clip allows and orthogonal to everything else.

    Canary i has a weight of its own, which only its loss depends on: its gradient is a Dirac
    vector (Nasr et al. 2021, arXiv 2101.04535; Steinke et al. 2023, arXiv 2305.08846, section 6).
    The weights are a table beside the model, an embedding of the canary's number, that is trained
    together with it. A canary's score is the inner product of its gradient with the sum of what was
    released: seen from inside, of all noisy gradients, which the optimizer works on; from outside,
    with how far its weight has moved, which is by how much its loss has fallen.

    Args:
      model: a functional or sequential model, compiled with a loss that is one function or a list.
      x, y: the user's examples.
      number: int, canaries. The model sees in each of them a copy of a user's example, of weight 0.
      white_box: bool, whether noisy gradients are seen.

    Attributes:
      model: the model with the table, compiled with an optimizer like the user's.
      x, y: the data of both, canaries last.
      number: int.
    """

    def __init__(self, model, x, y, number, white_box):
        self.number, self._white_box = number, white_box
        if not getattr(model, "inputs", None):
            raise ValueError(
                "Worst-case canaries are trained beside the model, which needs a functional or "
                "sequential model; received "
                f"{type(model).__name__} '{model.name}'. Pass examples of your own as canaries=."
            )
        losses = _list_of_losses(model)
        inputs = _by_input(model, x)
        size = len(inputs[0])
        copies = np.arange(number) % size
        ids = np.zeros((size + number, 1), np.int32)
        ids[size:, 0] = np.arange(number) + 1
        self.x = [np.concatenate([part, part[copies]]) for part in inputs] + [ids]
        targets = [np.asarray(part) for part in keras.tree.flatten(y)]
        lengths = np.where(ids > 0, _LENGTH * _clip(model), 0).astype(np.float32)
        self.y = [np.concatenate([part, part[copies]]) for part in targets] + [lengths]
        self._table = keras.layers.Embedding(
            number + 1, 1, embeddings_initializer="zeros", dtype="float32", name="canaries"
        )
        ids = keras.Input((1,), dtype="int32", name="canary_ids")
        output = keras.layers.Reshape((1,), dtype="float32")(self._table(ids))
        self.model = keras.Model([*model.inputs, ids], [*model.outputs, output])
        optimizer, self._seen = _watched(_keras.compiled_optimizer(model), self._table)
        self.model.compile(
            optimizer,
            loss=[*losses, lambda length, weight: length * weight],
            jit_compile=model.jit_compile,
            run_eagerly=model.run_eagerly,
        )

    def sample_weights(self, included):
        """For each output: examples count in the user's, canaries that are in in the table's."""
        size = len(self.x[0]) - self.number
        own = np.concatenate([np.ones(size), np.zeros(self.number)]).astype(np.float32)
        table = np.concatenate([np.zeros(size), included]).astype(np.float32)
        return [own] * (len(self.y) - 1) + [table]

    def begin(self):
        """A run begins."""
        self._before = self._table.embeddings.numpy()
        self._seen.assign(tf.zeros_like(self._seen))

    def after_update(self):
        """An update was made."""

    def scores(self):
        """Float array ``[canaries]``."""
        if self._white_box:
            against = self._seen.numpy()
        else:
            against = self._before - self._table.embeddings.numpy()
        return against[1:, 0].astype(np.float64)


class Examples:
    """Canaries that are examples, such as mislabelled ones.

    Args:
      model: a compiled model.
      x, y: the user's examples.
      canaries: pair of inputs and targets, of the structure of x and y.
      white_box: bool. False: a canary's score is by how much its loss has fallen. True: it is the
        sum over all updates of the inner product of its gradient, clipped and taken before the
        update, with the update (Steinke et al. 2023, arXiv 2305.08846, Algorithm 3).

    Attributes:
      As of :class:`WorstCase`.
    """

    def __init__(self, model, x, y, canaries, white_box):
        if not isinstance(canaries, (tuple, list)) or len(canaries) != 2:
            raise ValueError(
                "canaries must be a pair (x, y) of examples and targets, or an int, the number of "
                f"worst-case canaries; received {type(canaries).__name__}."
            )
        self._canaries = keras.tree.map_structure(np.asarray, tuple(canaries))
        sizes = {len(part) for part in keras.tree.flatten(self._canaries)}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                f"canaries must have as many examples as targets, and at least one; received "
                f"{sorted(sizes)}."
            )
        self.model, self.number = model, sizes.pop()
        try:
            self.x, self.y = keras.tree.map_structure(
                lambda own, more: np.concatenate([np.asarray(own), more]), (x, y), self._canaries
            )
        except ValueError as error:
            raise ValueError(
                f"canaries must have the structure and the shapes of x and y: {error}"
            ) from error
        self.losses = model.loss
        self._white_box = white_box
        self._measure = tf.function(self._products if white_box else self._losses)
        first = keras.tree.map_structure(lambda a: a[:1], self._canaries)
        _keras.build(model, *keras.tree.map_structure(tf.convert_to_tensor, first), None)

    def sample_weights(self, included):
        """1 for the user's examples and for canaries that are in."""
        size = len(keras.tree.flatten(self.x)[0]) - self.number
        return np.concatenate([np.ones(size), included]).astype(np.float32)

    def begin(self):
        """A run begins."""
        if self._white_box:
            self._weights = self._now()
            self._scores = np.zeros(self.number)
        else:
            self._before = self._by_parts()

    def after_update(self):
        """An update was made."""
        if not self._white_box:
            return
        now, before = self._now(), self._weights
        # Gradients are those of the weights that the update began from.
        self._set(before)
        self._scores += self._by_parts([b - n for b, n in zip(before, now)])
        self._set(now)
        self._weights = now

    def scores(self):
        """Float array ``[canaries]``."""
        return self._scores if self._white_box else self._before - self._by_parts()

    def _now(self):
        return [v.numpy() for v in self.model.trainable_variables]

    def _set(self, weights):
        for variable, value in zip(self.model.trainable_variables, weights):
            variable.assign(value)

    def _by_parts(self, *arguments):
        """The measure of every canary, some at a time: gradients of single examples take room."""
        found = []
        for start in range(0, self.number, _ROWS_AT_ONCE):
            part = keras.tree.map_structure(
                lambda a: tf.convert_to_tensor(a[start : start + _ROWS_AT_ONCE]),  # noqa: B023
                self._canaries,
            )
            found.append(self._measure(part, *arguments).numpy())
        return np.concatenate(found).astype(np.float64)

    def _loss(self, example):
        """The loss of one example; weight regularizers depend on none and are left out."""
        x, y = rows.single(example)
        own = _keras.without_weight_regularizers(self.model.trainable_variables)
        with keras.StatelessScope(), own:
            return loss_of(self.model, None, x, y, self.model(x, training=False), None)

    def _losses(self, canaries):
        return _row_by_row(self._loss, canaries)

    def _products(self, canaries, direction):
        """Inner products of ``direction`` with the clipped gradients."""
        variables = [v.value for v in self.model.trainable_variables]
        clip = _clip(self.model)

        def product(example):
            with tf.GradientTape() as tape:
                value = self._loss(example)
            found = tape.gradient(
                value, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            found = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in found]
            norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g)) for g in found]))
            along = tf.add_n([tf.reduce_sum(g * d) for g, d in zip(found, direction)])
            return along * clip / tf.maximum(norm, clip)

        return _row_by_row(product, canaries)


def _row_by_row(function, batch):
    try:
        return tf.vectorized_map(function, batch)
    except (TypeError, ValueError, NotImplementedError, tf.errors.OpError):
        # What the vectorizer does not know; an error of the model itself comes again.
        return tf.map_fn(function, batch, fn_output_signature=tf.float32, parallel_iterations=1)


def _watched(optimizer, layer):
    """An optimizer of the same settings, and the sum of its noisy gradients of a layer's weight."""
    weight = layer.trainable_variables[0]
    seen = tf.Variable(tf.zeros(weight.shape), trainable=False)

    class Watched(type(optimizer)):
        def _privatized(self, scaled_sums, variables):
            private = super()._privatized(scaled_sums, variables)
            seen.assign_add(private[[v is weight for v in variables].index(True)])
            return private

    return Watched.from_config(optimizer.get_config()), seen


def _clip(model):
    return float(_keras.compiled_optimizer(model).l2_norm_clip)


def _list_of_losses(model):
    loss = model.loss
    if loss is None or isinstance(loss, dict):
        raise ValueError(
            "Worst-case canaries need a model that was compiled with one loss, or a list with one "
            f"for each output; received loss={loss!r}. Pass examples of your own as canaries=."
        )
    if not isinstance(loss, (list, tuple)):
        return [loss] * len(model.outputs)
    return list(loss)


def _by_input(model, x):
    """The arrays of x in the order of the model's inputs."""
    if isinstance(x, dict):
        names = [tensor.name for tensor in model.inputs]
        if set(names) != set(x):
            raise ValueError(f"x has the keys {sorted(x)}, and the model the inputs {names}.")
        parts = [x[name] for name in names]
    else:
        parts = keras.tree.flatten(x)
    if len(parts) != len(model.inputs):
        raise ValueError(f"x has {len(parts)} arrays, and the model {len(model.inputs)} inputs.")
    return [np.asarray(part) for part in parts]
