"""Do the examples of a batch influence each other? An experiment that tells.

Clipping each example's gradient bounds what one example can do only if that gradient
depends on no other example. For code that no list can know (a ``Lambda``, a custom
layer, an activation function) this file finds out: it runs the model on a few random
rows, replaces every row but one, runs it again with the same weights and the same
random state, and looks whether the output of the row that was kept has moved.
"""

import contextlib
import dataclasses
import functools
import math
import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dp._keras import all_layers

# For dimensions that an input leaves open: survives five halvings, as image models do.
_OPEN_SIZE = 64
_OPEN_SIZE_OF_VOLUMES = 16

# Relative differences that rounding may explain.
_ROUNDING = {"float16": 8e-3, "bfloat16": 6e-2}
_ROUNDING_FLOAT32 = 1e-5

_REPETITIONS = 3

# Kinds of inputs, the likeliest first: floats, and the integers below a bound. A model that
# looks floats up in a table wants small non-negative numbers, some image layers want pixels,
# and a short table has room for 0 and 1 only.
_KINDS = (("normal", 8), ("normal", 2), ("binary", 2), ("pixels", 2))


def couples_examples(model, num_rows=4, *, input_spec=None, run=None):
    """Tells whether examples of one batch influence each other in training mode.

    Runs the model eagerly three times on ``num_rows`` random rows (inputs as
    ``model.inputs`` declares them: floats are normal, integers below 8, open dimensions
    small), each time with the same weights, the same seeds and the
    same non-trainable state. In the second and third run all rows but one in the
    middle are replaced. If the output of the kept row differs by more than rounding,
    and repetitions of the same runs do not differ likewise, the examples are coupled.
    Where that does not answer, it starts over with integers of 0 and 1, with floats of 0 and
    1, and of 0 to 256.

    Nothing is written: weights, seed generators and other state of the model stay bit
    for bit what they were. Trainable weights that are constant or almost zero (a
    zero-initialised head, a residual branch scaled by zero) read as random values
    during the experiment, since nothing could be seen through them.

    False is an observation and no proof: a dependence that shows on rare inputs only
    is not seen.

    Args:
      model: a built ``keras.Model``.
      num_rows: int >= 2, rows of the random batch. A fixed batch size of the model
        takes precedence.
      input_spec: nest of objects with ``shape`` (batch first) and ``dtype``, in the
        structure that ``model`` is called on. Read only when the model does not know
        its inputs itself, as subclassed models do not.

    Returns:
      True when examples influence each other, False when they do not as far as the
      experiment can see, None when it cannot tell: inputs unknown, sparse or strings,
      a fixed batch of one row, or a model that fails on random inputs, that is not
      deterministic, or whose outputs do not react to its inputs.

    Raises:
      ValueError: if ``num_rows`` is below 2.
    """
    return _ask(_Experiment.verdict, model, num_rows, input_spec, run)


def first_coupling_operation(model, num_rows=4, *, input_spec=None):
    """The innermost layer or operation at which one row first feels another one.

    Args:
      model: a built ``keras.Model`` that ``couples_examples``.
      num_rows: as for ``couples_examples``.
      input_spec: as for ``couples_examples``.

    Returns:
      A ``keras.layers.Layer`` or ``keras.Operation``: the first to finish whose inputs
      agree in the kept row between two runs, and whose outputs do not. It is ``model``
      itself when the coupling is written in the ``call`` of a subclassed model, and
      None when nothing was found.
    """
    return _ask(_Experiment.culprit, model, num_rows, input_spec)


def _ask(question, model, num_rows, input_spec, run=None):
    """Answers `question` by the first experiment that runs and has an answer."""
    if num_rows < 2:
        raise ValueError(f"num_rows must be at least 2, two examples; received {num_rows}.")
    # The caller may be tracing its training step; the experiment is eager. Elsewhere no
    # init_scope, which would stop the tapes that `run` may open.
    with contextlib.nullcontext() if tf.executing_eagerly() else tf.init_scope():
        spec = _input_spec(model, input_spec)
        if spec is None:
            return None
        leaves = keras.tree.flatten(spec)
        fixed_sizes = {leaf.shape[0] for leaf in leaves if leaf.shape[0] is not None}
        rows = fixed_sizes.pop() if fixed_sizes else num_rows
        if fixed_sizes or rows < 2:
            return None
        for kind in _KINDS:
            # A model may refuse random rows for any reason of its own. That says
            # nothing about its examples, and must not stop the training of a good one.
            try:
                experiment = _Experiment(
                    model=model,
                    weights=_weights_to_see_through(model),
                    batch=_draw(spec, rows, kind),
                    replacement=_draw(spec, rows, kind, replacement=True),
                    num_rows=rows,
                    forward=run or _outputs,
                )
                answer = question(experiment)
            except Exception:
                continue
            if answer is not None:
                return answer
        return None


@dataclasses.dataclass(frozen=True)
class _Experiment:
    """A batch of random rows, other rows to replace them, and the model to run."""

    model: Any
    weights: list  # pairs (variable, value during the experiment)
    batch: Any
    replacement: Any
    num_rows: int
    forward: Any  # function (model, batch) -> nest of tensors to compare

    @property
    def kept_rows(self):
        """Two rows in the middle, where couplings that only look back, or ahead, show."""
        return (self.num_rows // 2 - 1, self.num_rows // 2)

    def run(self, kept=None):
        """Flat outputs for the batch, with every row replaced but `kept` if it is given."""
        batch = self.batch
        if kept is not None:
            keep = np.arange(self.num_rows) == kept
            batch = keras.tree.map_structure(
                lambda x, y: tf.where(keep.reshape([-1] + [1] * (len(x.shape) - 1)), x, y),
                self.batch,
                self.replacement,
            )
        # Writes to Keras variables stay in the scope and end with it.
        with (
            _python_random_state_kept(),
            keras.StatelessScope(state_mapping=self.weights, collect_losses=True),
        ):
            outputs = self.forward(self.model, batch)
        return [keras.ops.convert_to_numpy(x) for x in keras.tree.flatten(outputs)]

    def verdict(self):
        """True, False or None, as `couples_examples` returns it."""
        first = self.run()
        runs = {kept: self.run(kept) for kept in self.kept_rows}
        moved = {kept: self.distance(first, run, kept) for kept, run in runs.items()}
        if max(moved.values()) <= 1:
            one, two = self.kept_rows
            reacts = max(self.distance(first, runs[one], two), self.distance(first, runs[two], one))
            return False if reacts > 1 else None
        kept = max(moved, key=moved.get)
        for _ in range(_REPETITIONS):
            # Chance may have moved the row: random numbers that Keras does not manage, or
            # rounding that the model amplifies.
            noise = max(
                self.distance(first, self.run(), kept),
                self.distance(runs[kept], self.run(kept), kept),
            )
            if moved[kept] <= 1 + 10 * noise:
                return None
        return True

    def culprit(self):
        """The first operation that brings another row in, or None."""
        for kept in self.kept_rows:
            with _recorded_calls(self.model) as first:
                self.run()
            with _recorded_calls(self.model) as second:
                self.run(kept)
            for (operation, inputs, outputs), (_, new_inputs, new_outputs) in zip(first, second):
                if (
                    self.distance(inputs, new_inputs, kept) <= 1
                    and self.distance(outputs, new_outputs, kept) > 1
                ):
                    return operation
        return None

    def distance(self, tensors, others, row):
        """Greatest difference in `row`, in units of what rounding may explain."""
        return max(
            (
                _distance(self._rows_of(x, row), self._rows_of(y, row))
                for x, y in zip(tensors, others)
            ),
            default=0.0,
        )

    def _rows_of(self, x, row):
        """What belongs to `row` in a tensor with one or several entries for each row.

        All of a tensor that has no axis for the rows: it belongs to each of them.
        """
        if x.ndim == 0 or x.shape[0] == 0 or x.shape[0] % self.num_rows:
            return x
        each = x.shape[0] // self.num_rows
        return x[row * each : (row + 1) * each]


def _outputs(model, batch):
    return model(batch, training=True)


def _input_spec(model, given):
    """Nest of shapes and dtypes that `model` is called on, or None if it cannot be drawn."""
    if isinstance(model, keras.Function):
        spec = model.input
    elif isinstance(model, keras.Sequential) and getattr(model, "inputs", None):
        (spec,) = model.inputs
    elif given is not None:
        leaves = keras.tree.flatten(given)
        if any(leaf is None or tf.TensorShape(leaf.shape).rank is None for leaf in leaves):
            return None
        spec = keras.tree.map_structure(_open_batch, given)
    else:
        config = model.get_build_config()
        if not config or "input_shape" not in config:
            return None
        spec = keras.tree.map_shape_structure(keras.KerasTensor, config["input_shape"])
    for leaf in keras.tree.flatten(spec):
        if leaf.dtype == "string" or getattr(leaf, "sparse", False) or len(leaf.shape) == 0:
            return None
    return spec


def _open_batch(leaf):
    return keras.KerasTensor((None, *leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype))


def _draw(spec, rows, kind, replacement=False):
    """Random rows; the rows to replace them have another mean and another spread."""
    leaves = keras.tree.flatten(spec)
    drawn = [_draw_leaf(leaf, i, rows, kind, replacement) for i, leaf in enumerate(leaves)]
    return keras.tree.pack_sequence_as(spec, drawn)


def _draw_leaf(leaf, index, rows, kind, replacement):
    open_size = _OPEN_SIZE if leaf.shape[1:].count(None) < 3 else _OPEN_SIZE_OF_VOLUMES
    shape = (rows, *(open_size if size is None else size for size in leaf.shape[1:]))
    rng = np.random.default_rng([index, replacement])
    kind, bound = kind
    if not keras.backend.is_float_dtype(leaf.dtype):
        kind = "binary"
        if bound > 2 and leaf.dtype != "bool":
            values = rng.integers(0, bound // 2 if replacement else bound, size=shape)
            return tf.cast(tf.constant(values), leaf.dtype)
    if kind == "normal":
        values = 1.0 + 3.0 * rng.normal(size=shape) if replacement else rng.normal(size=shape)
        # Zeros are what a model may ask for: floats that it takes for a mask, or for padding.
        values *= rng.uniform(size=shape) > 0.2
    elif kind == "pixels":
        values = rng.uniform(high=128.0 if replacement else 256.0, size=shape)
    else:
        values = np.random.default_rng(index).integers(0, 2, size=shape)
        values = 1 - values if replacement else values
    return tf.cast(tf.constant(values, tf.float32), leaf.dtype)


def _weights_to_see_through(model):
    """Random values for the trainable weights that would hide what lies behind them."""
    rng = np.random.default_rng(1)
    replaced = []
    for variable in model.trainable_variables:
        if variable.dtype not in ("float16", "bfloat16", "float32", "float64"):
            continue
        shape = tuple(variable.shape)
        usual_size = 1.0 / math.sqrt(math.prod(shape[:-1])) if len(shape) > 1 else 0.1
        value = tf.cast(tf.convert_to_tensor(variable.value), tf.float32)
        spread = tf.reduce_max(tf.abs(value - tf.reduce_mean(value)))
        if spread < 0.01 * usual_size:
            replaced.append((variable, value + usual_size * rng.normal(size=shape)))
    return replaced


def _distance(a, b):
    """Greatest difference of two arrays, in units of what rounding may explain."""
    rounding = _ROUNDING.get(str(a.dtype), _ROUNDING_FLOAT32)
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(a)
    if a.shape != b.shape or np.any(finite != np.isfinite(b)):
        return math.inf
    a, b = a[finite], b[finite]
    scale = max(np.max(np.abs(a), initial=0.0), np.max(np.abs(b), initial=0.0))
    return float(np.max(np.abs(a - b), initial=0.0) / (rounding * scale)) if scale else 0.0


@contextlib.contextmanager
def _python_random_state_kept():
    """Every run sees the random numbers of Python and NumPy that the first one saw."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def _recorded_calls(model):
    """Yields a list that receives (operation, inputs, outputs) as each call finishes."""
    operations = {}
    for layer in all_layers(model):
        operations[id(layer)] = layer
        if isinstance(layer, keras.Function):
            operations |= {id(operation): operation for operation in layer.operations}
    calls = []

    def record(operation, call):
        @functools.wraps(call)
        def recording_call(*args, **kwargs):
            outputs = call(*args, **kwargs)
            calls.append((operation, _arrays((args, kwargs)), _arrays(outputs)))
            return outputs

        return recording_call

    replaced = []
    try:
        for operation in operations.values():
            quantized = getattr(operation, "quantization_mode", None) is not None
            name = "quantized_call" if quantized else "call"
            attributes = vars(operation)
            replaced.append((attributes, name, name in attributes, attributes.get(name)))
            # Into the instance's dictionary: a layer may refuse new attributes once built.
            attributes[name] = record(operation, getattr(operation, name))
        yield calls
    finally:
        for attributes, name, existed, value in replaced:
            if existed:
                attributes[name] = value
            else:
                del attributes[name]


def _arrays(nest):
    return [keras.ops.convert_to_numpy(x) for x in keras.tree.flatten(nest) if tf.is_tensor(x)]
