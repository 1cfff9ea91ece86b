"""What a rule is, and how a layer is watched unless its rule says otherwise."""

import contextlib
import dataclasses
from collections.abc import Callable

import tensorflow as tf

from keras_dp import _keras


class NotLayerwise(Exception):
    """The layerwise engine cannot see the gradient of this model; says why."""


@dataclasses.dataclass
class Use:
    """One call of one recorded layer.

    Attributes:
      layer: the layer.
      variables: the trained weights that its rule, or the fallback, answers for.
      rule: its :class:`Rule`, or None for the fallback.
      args, kwargs: the arguments of the call.
      outputs: what the tape watches, in order; their gradients are what a rule gets.
      saved: whatever the rule's ``record`` leaves there for its ``forms``.
      rows_per_example: consecutive rows of the call that belong to one example.
    """

    layer: object
    variables: list
    rule: "Rule | None"
    args: tuple
    kwargs: dict
    outputs: list = dataclasses.field(default_factory=list)
    saved: object = None
    rows_per_example: int | tf.Tensor = 1

    @property
    def input(self):
        """The layer's first input."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))


def before_activation(use, call, watch):
    """Runs the call and watches what the layer's activation is applied to.

    Without an activation, that is the output.
    """
    with _watched_activation(use.layer, watch) as wrapped:
        outputs = call(*use.args, **use.kwargs)
    if not wrapped or not use.outputs:
        outputs = watch(tf.convert_to_tensor(outputs))
    if len(use.outputs) != 1:
        raise NotLayerwise(
            f"layer '{use.layer.path}' applied its activation {len(use.outputs)} times"
        )
    return outputs


def every_output(use, call, watch):
    """Runs the call and watches every floating-point tensor it returns.

    An output may be returned twice, or be computed from another one, as a cell's states are. Each
    is watched as a tensor of its own, whose gradient is from what follows the layer alone.
    """

    def watched(output):
        if not tf.is_tensor(output) or not output.dtype.is_floating:
            return output
        return watch(_keras.with_mask(tf.identity(output), _keras.get_mask(output)))

    return tf.nest.map_structure(watched, call(*use.args, **use.kwargs))


def without_lora(layer):
    """Whether ``layer`` has no low-rank factors beside its weights."""
    return not getattr(layer, "lora_enabled", False)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the gradients of one class of layers are found.

    Attributes:
      forms: function ``forms(use, *gradients)`` that yields ``(variable, form)`` for every
        trained weight, given the gradient of the loss with respect to each watched tensor.
      record: function ``record(use, call, watch)`` that returns what the layer's call
        returns, by ``call(*use.args, **use.kwargs)`` or otherwise, and hands what is to be
        watched to ``watch(tensor)``.
      whole: whether it answers for the weights of the layers inside too.
      holds: function of a layer of the class, whether the rule holds for this one. Default:
        unless it has LoRA.
    """

    forms: Callable
    record: Callable = before_activation
    whole: bool = False
    holds: Callable = without_lora


@contextlib.contextmanager
def replaced(layer, **attributes):
    """While open, attributes of ``layer`` have other values, past Keras's tracking of state."""
    kept = {name: (name in layer.__dict__, layer.__dict__.get(name)) for name in attributes}
    try:
        for name, value in attributes.items():
            object.__setattr__(layer, name, value)
        yield
    finally:
        for name, (existed, value) in kept.items():
            if existed:
                object.__setattr__(layer, name, value)
            else:
                layer.__dict__.pop(name, None)


@contextlib.contextmanager
def _watched_activation(layer, watch):
    """Lets ``watch`` see what the layer's activation is applied to; yields whether it has one."""
    activation = getattr(layer, "activation", None)
    if activation is None:
        yield False
        return
    with replaced(layer, activation=lambda z: activation(watch(z))):
        yield True
