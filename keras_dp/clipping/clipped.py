"""``ClippedGradients``: the only thing that a DP optimizer accepts."""

import dataclasses

import tensorflow as tf

from keras_dp.errors import UnclippedGradientsError
from keras_dp.pieces import Piece


@dataclasses.dataclass
class ClippedGradients:
    """Sums of per-example gradients, each clipped. Not private yet: the noise is missing.

    Hand it to ``optimizer.apply_gradients``, once.

    Attributes:
      scaled_sums: for each variable, float32, the sum over the batch of the clipped gradients,
        divided by the constant ``batch_size`` of the optimizer.
      variables: the trainable variables of the model, in that order.
      loss: float32 scalar, the mean loss of the examples. For logs; not private.
      num_examples: int64 scalar, the examples counted, not their augmented copies. Not private
        under Poisson sampling.
      piece: the :class:`keras_dp.pieces.Piece` whose inputs they are of, or None.
      batch: one tensor or array of the batch as it was given.
    """

    scaled_sums: list
    variables: list
    loss: tf.Tensor
    num_examples: tf.Tensor
    _optimizer: object = dataclasses.field(repr=False)
    piece: Piece | None = dataclasses.field(default=None, repr=False)
    batch: object = dataclasses.field(default=None, repr=False)
    _spent: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self):
        self._made_in = _current_graph()

    @property
    def sums(self):
        """The sums themselves."""
        return [s * self._optimizer.batch_size for s in self.scaled_sums]

    def spend(self, optimizer):
        """Marks the gradients as used by ``optimizer``; they can be used once, by it alone."""
        if optimizer is not self._optimizer:
            raise UnclippedGradientsError(
                f"{optimizer!r} received gradients that were clipped for {self._optimizer!r}. "
                "Call keras_dp.clipped_gradients with the optimizer that applies them."
            )
        if self._spent:
            raise UnclippedGradientsError(
                "These clipped gradients were applied before. Every update needs gradients of "
                "its own batch: call keras_dp.clipped_gradients again."
            )
        if _current_graph() is not self._made_in:
            raise UnclippedGradientsError(
                "These clipped gradients were made outside the tf.function, loop or branch that "
                "applies them, which could run several times on the same batch. Call "
                "keras_dp.clipped_gradients and optimizer.apply_gradients in the same one."
            )
        self._spent = True


def _current_graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
