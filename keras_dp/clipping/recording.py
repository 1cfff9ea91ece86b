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

import keras
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


@dataclasses.dataclass(frozen=True)
class Constants:
    """The calls of recorded layers whose input does not depend on the examples.

    A trial run finds them (``alignment.py``). They get their input once for each example, so
    that their output has a row for each.

    Attributes:
      layers: the layer of every recorded call of a pass, in order.
      has_unit_axis: for each such call, by its number: for each of its tensors, whether it has
        an axis of length 1 in front that the examples take the place of, or none.
    """

    layers: tuple
    has_unit_axis: dict


class Recorder:
    """Records one forward pass and the loss behind it.

    Args:
      model: the model to be called.
      variables: its trainable variables.
      batch: the number of examples, int or scalar tensor; read only with ``constants``.
      constants: None or :class:`Constants`.
    """

    def __init__(self, model, variables, *, batch=None, constants=None):
        self.model = model
        self.variables = variables
        self.batch = batch
        self.constants = constants
        self.uses = []
        self.activity = []  # (regularizer, outputs, rows an example)
        self.units = list(_units(model, variables))
        answered = {id(v) for unit in self.units for v in unit.variables}
        missing = [v.path for v in variables if id(v) not in answered]
        if missing:
            raise NotLayerwise(f"no layer owns the trainable weights {missing}")
        self._active = None
        self._runs = {}
        self._regularized = set()
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
                if regularizer is not None:
                    self._regularized.add(id(layer))
                unit = units.get(id(layer))
                another = rules.call_while_recording(layer)
                if unit is None and regularizer is None and another is None:
                    continue
                self._runs[id(layer)] = self._recorded(layer, unit, another, tape)
                call = self._with_activity(layer, regularizer)
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

    def run(self, layer, *args, **kwargs):
        """The call of ``layer`` as a layer around it makes it, activity regularizer left out."""
        return self._runs.get(id(layer), layer.call)(*args, **kwargs)

    def _recorded(self, layer, unit, another, tape):
        plain = layer.call

        def run(*args, **kwargs):
            if self._active is not None:
                return plain(*args, **kwargs)
            if another is not None:
                return another(self, layer, *args, **kwargs)
            if unit is None:
                return plain(*args, **kwargs)
            self._active = unit
            try:
                with self._strays.stop_recording():
                    return self._record(unit, plain, args, kwargs, tape)
            finally:
                self._active = None

        return run

    def _with_activity(self, layer, regularizer):
        run = self._runs[id(layer)]

        def call(*args, **kwargs):
            outputs = run(*args, **kwargs)
            if regularizer is not None:
                if self._active is not None:
                    raise NotLayerwise(
                        f"layer '{layer.path}' has an activity regularizer inside layer "
                        f"'{self._active.layer.path}', which has no rule"
                    )
                self.activity.append((regularizer, outputs, self._fold))
            return outputs

        return call

    def _record(self, unit, plain, args, kwargs, tape):
        args, kwargs = self._for_each_example(unit.layer, args, kwargs)
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

    def _for_each_example(self, layer, args, kwargs):
        """The arguments of a call, repeated for each example if they depend on none."""
        if self.constants is None:
            return args, kwargs
        number = len(self.uses)
        if number >= len(self.constants.layers) or self.constants.layers[number] is not layer:
            raise NotLayerwise(
                f"layer '{layer.path}' is called where a trial run called another one, so that it "
                "is not known whether its input depends on the examples"
            )
        if number not in self.constants.has_unit_axis:
            return args, kwargs
        if id(layer) in self._regularized:
            raise NotLayerwise(
                f"layer '{layer.path}' has an activity regularizer and an input that does not "
                "depend on the examples"
            )
        has_unit_axis = iter(self.constants.has_unit_axis[number])

        def repeated(value):
            if not tf.is_tensor(value):
                return value
            value = value if next(has_unit_axis) else value[None]
            return tf.repeat(value, self.batch * self._fold, 0)

        return tf.nest.map_structure(repeated, (args, kwargs))

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
        strays = {id(v): v.path for v in self.variables if id(v.value) in read}
        if not strays:
            return
        tables = [
            v
            for layer in _keras.all_layers(self.model)
            if isinstance(layer, keras.layers.Embedding)
            for v in _keras.own_trainable_variables(layer)
        ]
        repair = ""
        if any(id(v) in strays for v in tables):
            repair = (
                "; a keras.layers.ReversibleEmbedding, called with reverse=True, gives the logits "
                "of a tied embedding in a way that can be seen"
            )
        raise NotLayerwise(
            f"{[*strays.values()]} are read outside the call of the layer that owns them{repair}"
        )


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
            if layer is model and isinstance(model, keras.Model):
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
