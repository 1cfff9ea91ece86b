"""Attention and AdditiveAttention: few numbers, multiplied into the scores.

Every example gets a copy of the weights, in the place of the weights, for as long as the
call runs. The gradient of a copy is the gradient of one example; nothing is run again, so
dropout draws once.
"""

import tensorflow as tf

from keras_dp.clipping.forms import PerExample
from keras_dp.clipping.rules.rule import replaced


def copied_weights(use, call, watch):
    """Runs the call on copies of the weights, which it watches."""
    layer, query = use.layer, use.input[0]
    scores = query.shape.rank  # [batch, ..., Tq, Tv]
    # How many axes what a weight multiplies has. The scores before the sum over features have one
    # more, and so have those that the scale of "concat" multiplies.
    ranks = {"scale": scores, "concat_score_weight": scores}
    if layer.score_mode == "concat" or len(_shape(layer, "scale")) == 1:
        ranks["scale"] += 1
    use.saved = [
        (name, getattr(layer, name)) for name in ranks if _is_trained(getattr(layer, name, None))
    ]
    copies = {}
    for name, variable in use.saved:
        shape = [1] * (ranks[name] - 1 - len(variable.shape)) + [*variable.shape]
        copy = tf.reshape(tf.cast(tf.convert_to_tensor(variable.value), tf.float32), [1, *shape])
        copy = watch(tf.broadcast_to(copy, [tf.shape(query)[0], *shape]))
        copies[name] = tf.cast(copy, layer.compute_dtype)
    with replaced(layer, **copies):
        return call(*use.args, **use.kwargs)


def copied(use, *gradients):
    """The gradient of each example's copy."""
    for (_, variable), g in zip(use.saved, gradients):
        yield variable, PerExample(tf.reshape(g, [-1, *variable.shape]), variable.shape)


def _shape(layer, name):
    weight = getattr(layer, name, None)
    return () if weight is None else weight.shape


def _is_trained(weight):
    return weight is not None and weight.trainable
