"""Does row i of what is recorded belong to example i, in every layer?

A model can keep its examples apart and still call a layer on rows that are not the
examples: on [batch x time, features], on [time, batch, features], on the batch in another
order, on positions that belong to no example. The norms of such rows would be put together
wrongly. The shapes do not always tell (time may be as long as the batch), so the trial run
of ``keras_dp.independence`` does: it looks at every recorded output and its gradient, and
not only at the outputs of the model.

Where a layer is called on the same input whatever the examples are, as a table of positions
is on ``ops.arange(time)``, its output has no row for each example. Recording gives such a
call its input once for each example. The trial is then run again in this way, and has to
give the outputs of the plain model.
"""

import concurrent.futures
import dataclasses

import keras
import numpy as np
import tensorflow as tf

from keras_dp import _keras, independence
from keras_dp.clipping import composition
from keras_dp.clipping.recording import Constants, Recorder


@dataclasses.dataclass(frozen=True)
class Alignment:
    """What a trial run says of the rows that the layerwise backend would record.

    Attributes:
      aligned: True when row i is example i everywhere. False when a row of an output, of a
        recorded layer or of its gradient depends on another example, when the number of rows
        is not that of the examples, or when a recorded layer does not depend on the examples
        at all. None when the trial run cannot tell.
      constants: None, or the calls that are to be given their input once for each example.
    """

    aligned: bool | None
    constants: Constants | None = None


def rows_are_examples(model, variables, input_spec):
    """Tells by a trial run whether recorded rows and outputs belong to one example each.

    Args:
      model: the model.
      variables: its trainable variables.
      input_spec: nest of objects with ``shape`` and ``dtype``, what the model is called on.

    Returns:
      An :class:`Alignment`.
    """
    # In a thread of its own: the caller may come by tf.init_scope, which stops every gradient
    # tape of its thread.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        if thread.submit(_parts_are_aligned, model).result():
            return Alignment(True)
        return thread.submit(_rows_are_examples, model, variables, input_spec).result()


def _parts_are_aligned(model):
    """Whether the model is a graph of parts of which each keeps its rows apart."""
    parts = composition.parts_to_try(model)
    return parts is not None and all(
        _Trial(layer, layer.trainable_variables).verdict(inputs) is True for layer, inputs in parts
    )


def _rows_are_examples(model, variables, input_spec):
    plain = _Trial(model, variables)
    aligned = plain.verdict(input_spec)
    if aligned is not False:
        return Alignment(aligned)
    constants = plain.constants()
    if constants is None:
        return Alignment(False)
    repeated = _Trial(model, variables, constants)
    if repeated.verdict(input_spec) is True and repeated.gives_outputs_of(plain):
        return Alignment(True, constants)
    return Alignment(False)


class _Trial:
    """A trial run with recording, and what was seen in each of its passes."""

    def __init__(self, model, variables, constants=None):
        self.model, self.variables, self.given = model, variables, constants
        self.other_sizes = False
        self.layers = []  # of the uses, in order
        self.inputs = []  # for each pass, for each use, the arrays it was called on
        self.recorded = []  # for each pass, every recorded output beside its gradient
        self.outputs = {}  # of the model, by the batch

    def verdict(self, input_spec):
        """True, False or None, as ``Alignment.aligned``."""
        coupled = independence.couples_examples(self.model, input_spec=input_spec, run=self.run)
        if self.other_sizes or (self.recorded and _constant(self.recorded)):
            return False
        return None if coupled is None else not coupled

    def run(self, model, batch):
        """One pass forward and backward; returns what has to stay apart."""
        leaves = tf.nest.flatten(batch)
        size = leaves[0].shape[0]
        recorder = Recorder(model, self.variables, batch=size, constants=self.given)
        with tf.GradientTape(watch_accessed_variables=False) as tape, recorder.recording(tape):
            outputs = _keras.call_model(model, batch)
            total = tf.add_n([_projection(o) for o in tf.nest.flatten(outputs)])
        recorded = [output for use in recorder.uses for output in use.outputs]
        gradients = [
            tf.zeros_like(r) if g is None else tf.convert_to_tensor(g)
            for r, g in zip(recorded, tape.gradient(total, recorded))
        ]
        self.other_sizes |= any(
            r.shape[0] != size * use.rows_per_example for use in recorder.uses for r in use.outputs
        )
        self.layers = [use.layer for use in recorder.uses]
        self.inputs.append([_tensors(use) for use in recorder.uses])
        self.recorded.append([(r.numpy(), g.numpy()) for r, g in zip(recorded, gradients)])
        self.outputs[_key(leaves)] = tf.nest.flatten(outputs)
        return [outputs, recorded, gradients]

    def constants(self):
        """The calls whose inputs were the same in all passes, or None."""
        if any(len(uses) != len(self.layers) for uses in self.inputs):
            return None
        found = {}
        for k, (first, *others) in enumerate(zip(*self.inputs)):
            if first and all(_equal(first, other) for other in others):
                found[k] = tuple(array.shape[:1] == (1,) for array in first)
        return Constants(tuple(self.layers), found) if found else None

    def gives_outputs_of(self, other):
        """Whether the model's outputs are those of another trial, wherever both ran."""
        common = self.outputs.keys() & other.outputs.keys()
        pairs = [p for key in common for p in zip(self.outputs[key], other.outputs[key])]
        return bool(pairs) and all(_close(a, b) for a, b in pairs)


def _tensors(use):
    return [t.numpy() for t in tf.nest.flatten((use.args, use.kwargs)) if tf.is_tensor(t)]


def _key(tensors):
    return tuple(keras.ops.convert_to_numpy(t).tobytes() for t in tensors)


def _close(a, b):
    if a.shape != b.shape:
        return False
    if not a.dtype.is_floating:
        return bool(tf.reduce_all(a == b))
    relative = 2e-2 if a.dtype.size == 2 else 1e-5
    a, b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    rounding = relative * tf.reduce_max(tf.abs(a))
    return bool(tf.reduce_all(tf.abs(a - b) <= rounding))


def _equal(arrays, others):
    return len(arrays) == len(others) and all(map(np.array_equal, arrays, others))


def _projection(output):
    """A number that depends on every entry of a floating-point output, each in its own way."""
    if not output.dtype.is_floating:
        return tf.constant(0.0)
    one_row = output.shape[1:]
    weights = np.cos(np.arange(one_row.num_elements())).reshape(one_row).astype("float32")
    # Not linear, so that a row of the gradient depends on that row of the output.
    return tf.reduce_sum(weights * tf.sin(tf.cast(output, tf.float32)))


def _constant(seen):
    """Whether some recorded output and its gradient were the same in all passes.

    Then nothing shows which examples its rows belong to.
    """
    return any(all(_equal(pair, first) for pair in others) for first, *others in zip(*seen))
