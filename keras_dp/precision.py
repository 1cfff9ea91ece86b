"""Products of float32 numbers as float32.

GPUs with TensorFloat-32, and TPUs, round the factors of a float32 product to 10 or 7 bits by
default. An example's norm and its clipped gradient come from different products, each with its
own rounding: where the gradients of many positions nearly cancel, the example would weigh more in
the sum than the clipping norm allows (0.5 % more where 1 % is left of them, without limit in
general).
"""

import warnings

import tensorflow as tf


def ensure_float32_products():
    """Turns reduced precision of float32 products off, for the whole process."""
    if not tf.config.experimental.tensor_float_32_execution_enabled():
        return
    tf.config.experimental.enable_tensor_float_32_execution(False)
    warnings.warn(
        "keras_dp: float32 products are computed in full precision from here on "
        "(tf.config.experimental.enable_tensor_float_32_execution(False)): with rounded factors an "
        "example could weigh more than l2_norm_clip. For speed, and with the same bound, compute "
        "activations in bfloat16: keras.mixed_precision.set_global_policy('mixed_bfloat16').",
        stacklevel=3,
    )


def ensure_float32_products_of_gpus():
    """The same where TensorFlow sees a GPU; a CPU always computes them so."""
    if tf.config.list_physical_devices("GPU"):
        ensure_float32_products()
