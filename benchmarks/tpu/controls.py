"""Programs that the compiler must refuse: a check that would pass anything finds nothing."""

import keras
import numpy as np
import tensorflow as tf

import keras_dp
from benchmarks import clock
from benchmarks.tpu import program
from benchmarks.tpu.strategy import ReplicatedStrategy
from benchmarks.zoo import ZOO


def python_in_the_loss(replicas):
    """A loss that calls Python, which no TPU can: TensorFlow must not lower it."""
    entry, rows = ZOO["cnn"], 8

    def loss(y, logits):
        plain = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return tf.ensure_shape(tf.numpy_function(np.abs, [plain], tf.float32), plain.shape)

    strategy = ReplicatedStrategy(replicas)
    with strategy.scope():
        model = entry.build()
        optimizer = keras_dp.DPSGD(
            clock.LEARNING_RATE, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=rows * replicas
        )
        model.compile(optimizer, loss)
    example = (*entry.data(1), np.ones(1, np.float32))
    return program.from_model(model, strategy, example, rows)


def another_number_of_replicas(replicas):
    """A program that sums over twice as many replicas as it is compiled for."""
    return program.build("cnn", "DPSGD", 2 * replicas, private=True, batch_size=8)


def too_large(replicas):
    """4 million images a replica, 13 GB, and 17 GB for what each hidden layer makes of them."""
    return program.build("mlp", "DPSGD", replicas, private=True, batch_size=2**22)


CONTROLS = {
    "python_in_the_loss": python_in_the_loss,
    "another_number_of_replicas": another_number_of_replicas,
    "too_large": too_large,
}
