"""PReLU: a learned slope below zero."""

import tensorflow as tf

from keras_dp.clipping.forms import PerExample
from keras_dp.clipping.rules.axes import sum_to


def prelu(use, g):
    """z = max(x, 0) + alpha * min(x, 0); alpha has size 1 along shared axes."""
    alpha = use.layer.alpha
    slope = tf.cast(tf.minimum(use.input, 0), tf.float32) * tf.cast(g, tf.float32)
    yield alpha, PerExample(sum_to(slope, alpha.shape), alpha.shape)
