"""Recording: which layers were used, with what input, and with what output before activation.

While a model is traced, the bound ``call`` of every layer that owns trainable weights is
replaced on the instance, and the activation it applies is wrapped, so that the input and
the pre-activation output of each use are kept and the output is watched by the tape.
A layer called several times has several uses.

Nothing may escape. A trainable variable that is read while no recorded layer is being
called (a parent that multiplies by a child's kernel, a loss that reads a weight) is found
by a second tape that sleeps during recorded calls.
"""

import contextlib
import dataclasses

import tensorflow as tf

from keras_dp import _keras
from keras_dp.clipping import rules
from keras_dp.clipping.rules.rule import NotLayerwise, Rule, Use, every_output, replaced


@dataclasses.dataclass
class Unit:
    """A layer that owns trainable weights, the weights it answers for, and its rule."""

    layer: object
    variables: list
    rule: Rule | None


class Recorder:
    """Records one forward pass and the loss behind it.

    Args:
      model: the model to be called.
      variables: its trainable variables.
    """

    def __init__(self, model, variables):
        self.model = model
        self.variables = variables
        self.uses = []
        self.activity = []  # (layer, output) of layers with an activity regularizer
        self.units = list(_units(model, variables))
        answered = {id(v) for unit in self.units for v in unit.variables}
        missing = [v.path for v in variables if id(v) not in answered]
        if missing:
            raise NotLayerwise(f"no layer owns the trainable weights {missing}")
        self._active = None
        self._fold = 1
        self._graph = _current_graph()

    @contextlib.contextmanager
    def recording(self, tape):
        """Patches the layers for as long as it is open; restores them whatever happens."""
        units = {id(u.layer): u for u in self.units}
        self._strays = tf.GradientTape()
        with contextlib.ExitStack() as patches, self._strays:
            for layer in _keras.all_layers(self.model):
                regularizer = layer.activity_regularizer
                unit = units.get(id(layer))
                if unit is None and regularizer is None:
                    continue
                call = self._recorded(layer, unit, regularizer, tape)
                patches.enter_context(replaced(layer, call=call, activity_regularizer=None))
            yield self

    @contextlib.contextmanager
    def folded(self, count):
        """While open, layers are called on ``count`` consecutive rows for each example."""
        outer, self._fold = self._fold, self._fold * count
        try:
            yield
        finally:
            self._fold = outer

    def _recorded(self, layer, unit, regularizer, tape):
        plain = layer.call

        def call(*args, **kwargs):
            if unit is None or self._active is not None:
                outputs = plain(*args, **kwargs)
            else:
                self._active = unit
                try:
                    with self._strays.stop_recording():
                        outputs = self._record(unit, plain, args, kwargs, tape)
                finally:
                    self._active = None
            if regularizer is not None:
                if self._active is not None:
                    raise NotLayerwise(
                        f"layer '{layer.path}' has an activity regularizer inside layer "
                        f"'{self._active.layer.path}', which has no rule"
                    )
                self.activity.append((regularizer, outputs))
            return outputs

        return call

    def _record(self, unit, plain, args, kwargs, tape):
        use = Use(unit.layer, unit.variables, unit.rule, args, kwargs, rows_per_example=self._fold)

        def watch(tensor):
            if _current_graph() is not self._graph or _in_vectorized_map(tensor):
                raise NotLayerwise(
                    f"layer '{unit.layer.path}' is called inside a loop or a function of its own, "
                    "where its output cannot be recorded"
                )
            tape.watch(tensor)
            use.outputs.append(tensor)
            return tensor

        record = every_output if unit.rule is None else unit.rule.record
        outputs = record(use, plain, watch)
        self.uses.append(use)
        return outputs

    def check_rows(self, batch):
        """Raises NotLayerwise when a recorded output has other rows than the examples.

        Args:
          batch: the number of examples as far as it is known, int or None.
        """
        for use in self.uses:
            if batch is None or not isinstance(use.rows_per_example, int):
                continue
            rows = {output.shape[0] for output in use.outputs}
            rows -= {batch * use.rows_per_example, None}
            if rows:
                raise NotLayerwise(
                    f"layer '{use.layer.path}' is called on {rows.pop()} rows where the batch has "
                    f"{batch} examples"
                )

    def check_strays(self):
        """Raises NotLayerwise when a trainable variable was read outside recorded calls."""
        read = {id(v) for v in self._strays.watched_variables()}
        strays = [v.path for v in self.variables if id(v.value) in read]
        if strays:
            raise NotLayerwise(f"{strays} are read outside the call of the layer that owns them")


def _units(model, variables):
    """The layers to record, each with the weights it answers for.

    With a rule these are its own; without, all below it, since its call is run again as a
    whole to find their gradients.
    """
    wanted = {id(v) for v in variables}
    for layer in _keras.all_layers(model):
        own = [v for v in _keras.own_trainable_variables(layer) if id(v) in wanted]
        rule = rules.rule_for(layer)
        if rules.is_whole(layer):
            own = [v for v in layer.trainable_variables if id(v) in wanted]
        elif own and rule is None:
            if layer is model:
                raise NotLayerwise(f"the model owns weights itself: {[v.path for v in own]}")
            own = [v for v in layer.trainable_variables if id(v) in wanted]
        if own:
            yield Unit(layer, own, rule)


def _in_vectorized_map(tensor):
    # tf.vectorized_map traces its body into the surrounding graph, under this scope, and
    # then converts it: tensors of the body itself are not part of the result.
    return not tf.executing_eagerly() and "loop_body" in tensor.op.name.split("/")


def _current_graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
