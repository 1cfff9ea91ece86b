"""The train step of one replica, private or plain, as ``model.fit`` would run it on a TPU.

Nothing of the step is written here: it is the ``train_step`` of a compiled model, with its
metrics, inside ``strategy.run``.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import keras_dp
from benchmarks import clock, fit
from benchmarks.tpu.strategy import ReplicatedStrategy
from benchmarks.zoo import ZOO, Entry
from keras_dp import _keras

# The Keras optimizer that each private one is built on.
PLAIN = {
    "DPSGD": keras.optimizers.SGD,
    "DPMomentum": lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
    "DPAdam": keras.optimizers.Adam,
    "DPAdamW": keras.optimizers.AdamW,
    "DPLamb": keras.optimizers.Lamb,
}

# The models of the cost page. Compiling all 24 blocks of a ViT-L takes long, and a block costs what
# the next one costs: so one block, and two.
_IMAGENET = {"input_shape": (224, 224, 3), "num_classes": 1000}
_VIT_L = {"patch_size": 16, "dim": 1024, "heads": 16}


def _large(function, rows, parameters, **arguments):
    shape, classes = _IMAGENET["input_shape"], _IMAGENET["num_classes"]
    arguments = _IMAGENET | arguments
    return Entry(function, rows, (rows, rows), shape, classes, parameters, arguments=arguments)


LARGE = {
    "resnet50": _large("resnet", 16, 25_557_032, depth=50, stem="large"),
    "vit_l_1": _large("vit", 16, 14_611_432, depth=1, **_VIT_L),
    "vit_l_2": _large("vit", 16, 27_207_656, depth=2, **_VIT_L),
}
ENTRIES = ZOO | LARGE


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced step and what it is about.

    Attributes:
      step: ``tf.function(jit_compile=True)`` of ``specs``.
      specs: its arguments, of one replica.
      parameters: number of trained weights.
    """

    step: object
    specs: tuple
    parameters: int


def build(model, optimizer, replicas, *, private, batch_size=None, policy="float32", noise=1.0):
    """The step of one replica.

    Args:
      model: name in ENTRIES.
      optimizer: name in PLAIN.
      replicas: int, how many there will be.
      private: whether keras_dp trains, or the Keras optimizer it is built on.
      batch_size: rows of one replica, padding included; by default the model's own.
      policy: Keras's dtype policy.
      noise: noise multiplier of the private step.

    Returns:
      :class:`Program`.
    """
    entry = ENTRIES[model]
    rows = batch_size or entry.batch_size
    keras.config.set_dtype_policy(policy)
    strategy = ReplicatedStrategy(replicas)
    with strategy.scope():
        built = entry.build()
        made = PLAIN[optimizer](clock.LEARNING_RATE)
        if private:
            made = getattr(keras_dp, optimizer)(
                clock.LEARNING_RATE,
                l2_norm_clip=clock.L2_NORM_CLIP,
                noise_multiplier=noise,
                batch_size=rows * replicas,
            )
        fit.compile_classifier(built, made, weighted_metrics=["sparse_categorical_accuracy"])
    if built.count_params() != entry.parameters:
        raise ValueError(f"{model} has {built.count_params()} weights, not {entry.parameters}.")
    return from_model(built, strategy, (*entry.data(1), np.ones(1, np.float32)), rows)


def from_model(model, strategy, example, rows):
    """The step of a compiled model on ``rows`` rows, of which those of weight 0 are padding.

    Args:
      model: compiled in the scope of ``strategy``.
      strategy: :class:`~benchmarks.tpu.strategy.ReplicatedStrategy`.
      example: (x, y, sample_weight) of any number of rows.
      rows: int, of a replica.
    """
    specs = tuple(tf.TensorSpec([rows, *array.shape[1:]], array.dtype) for array in example)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
        _keras.build(model, *map(tf.convert_to_tensor, example))

    @tf.function(jit_compile=True, autograph=False)
    def step(x, y, sample_weight):
        return strategy.run(model.train_step, args=((x, y, sample_weight),))

    return Program(step, specs, model.count_params())
