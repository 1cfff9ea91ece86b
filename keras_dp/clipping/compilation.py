"""Whether the step that is traced is known to stay outside XLA.

Some kernels of TensorFlow are fast, and what XLA makes of the same operation is not. A trace
does not show who will compile it, so only what is known counts.
"""

import contextlib
import contextvars

import tensorflow as tf

_outside_xla = contextvars.ContextVar("outside_xla", default=False)


@contextlib.contextmanager
def outside_xla(known):
    """While open, a step is traced that ``known`` says is not compiled by XLA."""
    token = _outside_xla.set(bool(known))
    try:
        yield
    finally:
        _outside_xla.reset(token)


def is_outside_xla():
    """Whether that is known of the step being traced."""
    return _outside_xla.get()


def is_for_tpu():
    """Whether the step being traced is one of TPUs, where XLA compiles everything.

    ``jit_compile`` of the model does not tell: under any strategy Keras takes "auto" for False.
    """
    kinds = (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy)
    return isinstance(tf.distribute.get_strategy(), kinds)
