"""What one pass over a batch, or a microbatch, leaves behind."""

import dataclasses

import tensorflow as tf

from keras_dp import _keras


@dataclasses.dataclass
class Pass:
    """The result of one pass.

    Attributes:
      sums: the clipped sum of each variable over the constant ``batch_size``, float32.
      losses: float32 ``[batch]``, the loss of each example. Not private.
      activity: float32 ``[batch]`` or None, each example's activity regularizers.
      y_pred: the model's outputs.
      scope: the stateless scope that the forward pass ran in, or None.
    """

    sums: list
    losses: tf.Tensor
    activity: tf.Tensor | None
    y_pred: object
    scope: object


def keep_state(model, scope):
    """Writes back the random states, the one thing that a forward pass may change.

    Any other state could carry an example's data past the clip, a metric that a layer keeps
    and reads included, so it stays as it was.
    """
    for generator in _keras.seed_generators(model):
        value = scope.get_current_value(generator.state)
        if value is not None:
            generator.state.assign(value)


def changed_state(model, scope):
    """Paths of the variables that the forward pass wanted to change and that stay as they were."""
    return [v.path for v in _keras.state_variables(model) if scope.get_current_value(v) is not None]
