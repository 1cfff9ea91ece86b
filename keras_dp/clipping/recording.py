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
from collections.abc import Callable

import tensorflow as tf

from keras_dp import _keras
from keras_dp.clipping import rules


class NotLayerwise(Exception):
    """The layerwise engine cannot see the gradient of this model; says why."""


@dataclasses.dataclass
class Use:
    """One call of one recorded layer.

    Attributes:
      unit: the recorded layer and how its gradients are found.
      args: positional arguments of the call.
      kwargs: keyword arguments of the call.
      outputs: what the tape watches: the output before the activation for a layer with
        a rule, every floating-point output for the others.
    """

    unit: "Unit"
    args: tuple
    kwargs: dict
    outputs: list

    @property
    def input(self):
        """The layer's first input."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))


@dataclasses.dataclass
class Unit:
    """A layer that owns trainable weights, the weights it answers for, and its rule."""

    layer: object
    variables: list
    rule: Callable | None


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
        self._graph = _current_graph()

    @contextlib.contextmanager
    def recording(self, tape):
        """Patches the layers for as long as it is open; restores them whatever happens."""
        layers = _keras.all_layers(self.model)
        units = {id(u.layer): u for u in self.units}
        patched = []
        self._strays = tf.GradientTape()
        try:
            with self._strays:
                for layer in layers:
                    regularizer = layer.activity_regularizer
                    unit = units.get(id(layer))
                    if unit is None and regularizer is None:
                        continue
                    patched.append((layer, layer.__dict__.get("call"), regularizer))
                    _set(layer, "activity_regularizer", None)
                    _set(layer, "call", self._recorded(layer, unit, regularizer, tape))
                yield self
        finally:
            for layer, call, regularizer in patched:
                layer.__dict__.pop("call")
                if call is not None:
                    _set(layer, "call", call)
                _set(layer, "activity_regularizer", regularizer)

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
        seen = []

        def watch(tensor):
            if _current_graph() is not self._graph or _in_vectorized_map(tensor):
                raise NotLayerwise(
                    f"layer '{unit.layer.path}' is called inside a loop or a function of its own, "
                    "where its output cannot be recorded"
                )
            tape.watch(tensor)
            seen.append(tensor)
            return tensor

        if unit.rule is None:
            outputs = plain(*args, **kwargs)
            for output in tf.nest.flatten(outputs):
                if tf.is_tensor(output) and output.dtype.is_floating:
                    watch(output)
        else:
            with _watched_activation(unit.layer, watch) as wrapped:
                outputs = plain(*args, **kwargs)
            if not wrapped or not seen:
                outputs = watch(tf.convert_to_tensor(outputs))
            if len(seen) != 1:
                raise NotLayerwise(
                    f"layer '{unit.layer.path}' applied its activation {len(seen)} times"
                )
        self.uses.append(Use(unit, args, kwargs, seen))
        return outputs

    def check_rows(self, batch):
        """Raises NotLayerwise when a recorded output has other rows than the examples.

        Args:
          batch: the number of examples as far as it is known, int or None.
        """
        for use in self.uses:
            rows = {output.shape[0] for output in use.outputs} - {batch, None}
            if rows:
                raise NotLayerwise(
                    f"layer '{use.unit.layer.path}' is called on {rows.pop()} rows where the "
                    f"batch has {batch or 'another number of'} examples"
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


@contextlib.contextmanager
def _watched_activation(layer, watch):
    """Lets ``watch`` see what the layer's activation is applied to; yields whether it has one."""
    activation = getattr(layer, "activation", None)
    if activation is None:
        yield False
        return
    _set(layer, "activation", lambda z: activation(watch(z)))
    try:
        yield True
    finally:
        _set(layer, "activation", activation)


# Past Keras's own __setattr__, which tracks state: what is set here is put back.
_set = object.__setattr__


def _in_vectorized_map(tensor):
    # tf.vectorized_map traces its body into the surrounding graph, under this scope, and
    # then converts it: tensors of the body itself are not part of the result.
    return not tf.executing_eagerly() and "loop_body" in tensor.op.name.split("/")


def _current_graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
