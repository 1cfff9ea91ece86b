"""Checks of the rules by which per-example gradients are found.

The oracle is a loop: one example after the other through the model and through
``tf.GradientTape``, with nothing of the engine in it.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from keras_dp import optimizers
from keras_dp.clipping import layerwise
from keras_dp.clipping.gradients import clipped_gradients
from keras_dp.clipping.settings import PrivacySettings

# Coefficients of the loss, and inputs, that no gradient survives.
_CORRUPTIONS = (1e30, float("nan"), float("inf"))

# What float32 may add to a sum of clipped gradients.
_SLACK = 1e-3


def check_rule(
    layer,
    input_shape,
    *,
    dtype=None,
    batch_size=5,
    call_kwargs=None,
    tolerance=2e-5,
):
    """Checks that the layerwise backend finds the right gradients for a layer.

    Puts the layer into a small model with random weights, inputs and a random linear loss, and
    compares with a loop over single examples: the norm of each example's gradient for each
    variable, and the clipped sums, with and without XLA, with a known and an unknown batch
    size, in microbatches, and behind another layer. Then one example is made huge, NaN and
    infinite: its share of the sum has to stay within the clip, and all others as they were.

        keras_dp.testing.check_rule(Scale(), (6, 4))

    Call it for every way in which the layer's arguments change what it computes. A layer without
    a rule is checked too, as the fallback treats it.

    Args:
      layer: a ``keras.layers.Layer``, built or not. Its weights are as before afterwards.
      input_shape: shape of the input of one example, without the batch axis: tuple of ints, or
        a list of such tuples for a layer that is called on a list.
      dtype: dtype of the inputs; default float32. Integers are below ``layer.input_dim`` if the
        layer has one, else 0 and 1.
      batch_size: number of examples, at least 2.
      call_kwargs: dict of further arguments of the layer's call, the same for every batch.
      tolerance: greatest error allowed, relative to the largest norm, or entry, of the variable,
        and to a tenth of the largest of all variables: a gradient may be zero but for rounding.
        Norms of sums over T positions come out too large by up to 1e-6 T, on purpose.

    Raises:
      AssertionError: when something differs; tells which variable, and by how much.
      ValueError: when the layer has no trainable weights, or draws random numbers, so that
        nothing can be compared; when ``batch_size`` is below 2.
      IncompatibleModelError: when the layerwise backend cannot train the layer.
    """
    if batch_size < 2:
        raise ValueError(f"batch_size must be at least 2, two examples. Received: {batch_size}")
    shapes = input_shape if isinstance(input_shape, list) else [tuple(input_shape)]
    dtype = dtype or "float32"
    rng = np.random.default_rng(0)
    x = [_draw(rng, (batch_size, *shape), dtype, layer) for shape in shapes]
    x = x if isinstance(input_shape, list) else x[0]
    is_float = np.issubdtype(np.dtype(dtype), np.floating)
    check = _Check(layer, x, call_kwargs or {}, tolerance, rng, with_front=False)
    with _random_weights(layer, rng):
        check.prepare()
        for jit_compile, known in ((False, False), (False, True), (True, False)):
            check.norms_and_sums(jit_compile, known)
        check.microbatches()
        check.corrupted(corrupt_inputs=is_float)
        if is_float and all(shapes):
            front = _Check(layer, x, call_kwargs or {}, tolerance, rng, with_front=True)
            front.prepare()
            front.norms_and_sums(jit_compile=False, known=False)


def per_example_gradients(model, x, y, loss, *, sample_weight=None, jit_compile=None):
    """The gradient of every example's loss, by a loop with nothing of keras_dp in it.

    Args:
      model: a built model, called with ``training=True`` on one example at a time.
      x, y, sample_weight: the batch, nested arrays with the examples along the first axis.
      loss: function ``loss(y, y_pred, sample_weight=None)`` of a batch of one.
      jit_compile: None to run eagerly, else whether XLA compiles the function.

    Returns:
      For every example a list of arrays, one for each of ``model.trainable_variables``.
    """
    variables = model.trainable_variables

    def gradient(x, y, weight):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True), sample_weight=weight)
        found = tape.gradient(value, [v.value for v in variables])
        return [
            tf.zeros(v.shape) if g is None else tf.convert_to_tensor(g)
            for v, g in zip(variables, found)
        ]

    if jit_compile is not None:
        gradient = tf.function(gradient, jit_compile=jit_compile)
    size = len(keras.tree.flatten(x)[0])
    rows = [
        keras.tree.map_structure(lambda a, i=i: None if a is None else a[i : i + 1], batch)
        for i in range(size)
        for batch in [(x, y, sample_weight)]
    ]
    return [[np.asarray(g) for g in gradient(*row)] for row in rows]


class _Around(keras.Model):
    """The layer, or the layer behind dense ones; gives its floating-point outputs."""

    def __init__(self, layer, call_kwargs, fronts):
        super().__init__(name="around")
        self.layer, self.fronts, self.call_kwargs = layer, fronts, call_kwargs

    def call(self, x, training=None):
        if self.fronts:
            # A layer that takes a list takes no tuple, and has none in a functional model.
            flat = [front(t) for front, t in zip(self.fronts, keras.tree.flatten(x))]
            x = flat if isinstance(x, (list, tuple)) else flat[0]
        outputs = keras.tree.flatten(self.layer(x, **self.call_kwargs))
        outputs = [o for o in outputs if keras.backend.is_float_dtype(o.dtype)]
        return outputs if len(outputs) > 1 else outputs[0]


def _linear(y, y_pred, sample_weight=None):
    """Sum of all outputs, each times a coefficient."""
    pairs = zip(keras.tree.flatten(y), keras.tree.flatten(y_pred))
    return sum(tf.reduce_sum(a * tf.cast(p, tf.float32)) for a, p in pairs)


class _Check:
    """One model around the layer, and the norms and clipped sums it has to have."""

    def __init__(self, layer, x, call_kwargs, tolerance, rng, with_front):
        leaves = keras.tree.flatten(x)
        fronts = [keras.layers.Dense(t.shape[-1]) for t in leaves] if with_front else []
        self.layer, self.x, self.tolerance = layer, x, tolerance
        self.model = _Around(layer, dict(call_kwargs), fronts)
        self.size = len(leaves[0])
        self.functions = {}
        outputs = self.model(x, training=True)
        if not layer.trainable_variables:
            raise ValueError(f"layer '{layer.name}' has no trainable weights to be checked.")
        again = self.model(x, training=True)
        flat = keras.tree.flatten(outputs)
        if any(np.any(np.asarray(a != b)) for a, b in zip(flat, keras.tree.flatten(again))):
            raise ValueError(
                f"layer '{layer.name}' gives other outputs when it is called again: it draws "
                "random numbers, and the loop would draw others. Check it with a rate of 0."
            )
        y = [rng.normal(size=o.shape).astype("float32") for o in flat]
        self.y = y if len(y) > 1 else y[0]

    def prepare(self):
        """Finds what has to come out, with the weights as they are now."""
        self.variables = list(self.model.trainable_variables)
        found = per_example_gradients(self.model, self.x, self.y, _linear)
        self.gradients = [[np.asarray(g, np.float64) for g in example] for example in found]
        self.norms = np.array([[np.linalg.norm(g) for g in row] for row in self.gradients])
        total = np.linalg.norm(self.norms, axis=1)
        # Some examples are clipped and some are not.
        self.clip = float(np.mean(np.sort(total)[[self.size // 2 - 1, self.size // 2]]))
        self.factors = np.minimum(1.0, self.clip / np.maximum(total, 1e-30))

    def run(self, batch, jit_compile=False, known=False):
        """Norms, a tensor ``[batch]`` for each variable, and clipped sums of a batch (x, y)."""
        key = (jit_compile, known)
        if key not in self.functions:
            self.functions[key] = self.function(jit_compile, known)
        return self.functions[key](*batch)

    def function(self, jit_compile, known):
        """The function of :meth:`run`, traced for a batch of known or unknown size."""
        privacy = PrivacySettings(l2_norm_clip=self.clip, noise_multiplier=0.0, batch_size=1)

        def both(x, y):
            data = (x, y, None)
            found, _ = layerwise.weight_forms(self.model, _linear, self.variables, data)
            none = tf.zeros([tf.shape(keras.tree.flatten(x)[0])[0]])
            norms = [
                tf.sqrt(found[id(v)].squared_norms()) if id(v) in found else none
                for v in self.variables
            ]
            return norms, layerwise.clip_and_sum(
                found, self.variables, None, privacy, tf.shape(none)[0]
            )

        signature = keras.tree.map_structure(
            lambda a: tf.TensorSpec([self.size if known else None, *a.shape[1:]], a.dtype),
            (self.x, self.y),
        )
        return tf.function(
            both, input_signature=signature, jit_compile=jit_compile, autograph=False
        )

    def norms_and_sums(self, jit_compile, known):
        """Both as they have to be."""
        norms, sums = self.run((self.x, self.y), jit_compile, known)
        how = f"jit_compile={jit_compile}, batch size {'known' if known else 'unknown'}"
        for k, variable in enumerate(self.variables):
            want = self.norms[:, k]
            errors = np.abs(np.asarray(norms[k], np.float64) - want)
            worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
            self.require(
                errors[worst] <= self.tolerance * max(want.max(), 0.1 * self.norms.max()),
                variable,
                f"the gradient norm of example {worst} is {float(norms[k][worst]):.7g} and has to "
                f"be {want[worst]:.7g}",
                how,
            )
        self.compare_sums(sums, how)

    def compare_sums(self, sums, how):
        """Every variable's clipped sum, entry by entry."""
        sizes = sum(
            f * np.array([np.max(np.abs(g)) for g in row])
            for f, row in zip(self.factors, self.gradients)
        )
        for k, (variable, got) in enumerate(zip(self.variables, sums)):
            want = sum(f * row[k] for f, row in zip(self.factors, self.gradients))
            errors = np.abs(np.asarray(got, np.float64) - want)
            error = np.max(np.where(np.isnan(errors), np.inf, errors))
            self.require(
                error <= self.tolerance * max(sizes[k], 0.1 * max(sizes)),
                variable,
                f"an entry of the clipped sum is off by {error:.3g} where the largest entries of "
                f"the examples' terms add up to {sizes[k]:.3g}",
                how,
            )

    def microbatches(self):
        """By the public function, two examples at a time, trial run included."""
        optimizer = optimizers.DPSGD(
            1.0,
            l2_norm_clip=self.clip,
            noise_multiplier=0.0,
            batch_size=self.size,
            microbatch_size=2,
            backend="layerwise",
        )

        @tf.function(autograph=False)
        def run(x, y):
            return clipped_gradients(self.model, x, y, optimizer=optimizer, loss=_linear).sums

        self.compare_sums(run(self.x, self.y), "in microbatches of 2")

    def corrupted(self, corrupt_inputs):
        """One example that is huge or not finite adds no more than the clip."""
        others = zip(self.factors[1:], self.gradients[1:])
        rest = np.concatenate([np.ravel(s) for s in map(sum, zip(*_scaled(others)))])
        for value in _CORRUPTIONS:
            batches = [(self.x, _corrupt(self.y, value))]
            if corrupt_inputs:
                batches.append((_corrupt(self.x, value), self.y))
            for batch in batches:
                _, sums = self.run(batch)
                share = np.concatenate([np.ravel(s) for s in sums]) - rest
                assert np.all(np.isfinite(share)) and np.linalg.norm(share) <= self.clip * (
                    1 + _SLACK
                ), (
                    f"check_rule: layer '{self.layer.name}' ({type(self.layer).__name__}): one "
                    f"example with values of {value} moves the clipped sum by "
                    f"{np.linalg.norm(share):.7g}, and the clip is {self.clip:.7g}."
                )

    def require(self, holds, variable, what, how):
        """Raises AssertionError unless ``holds``."""
        assert holds, (
            f"check_rule: layer '{self.layer.name}' ({type(self.layer).__name__}), variable "
            f"'{variable.path}': {what} ({how}; tolerance {self.tolerance:g})."
        )


def _scaled(pairs):
    return [[factor * g for g in row] for factor, row in pairs]


def _draw(rng, shape, dtype, layer):
    if dtype == "bool" or not np.issubdtype(np.dtype(dtype), np.floating):
        bound = getattr(layer, "input_dim", None) or 2
        return rng.integers(0, bound if dtype != "bool" else 2, size=shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def _corrupt(structure, value):
    def first_row(array):
        array = array.copy()
        array[0] = value
        return array

    return keras.tree.map_structure(first_row, structure)


@contextlib.contextmanager
def _random_weights(layer, rng):
    """While open, every trained weight is off its initial value, which may hide errors."""
    before = [(v, np.asarray(v.value)) for v in layer.trainable_variables]
    try:
        for variable, value in before:
            moved = value + 0.3 * rng.normal(size=value.shape)
            variable.assign(moved.astype(value.dtype))
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
