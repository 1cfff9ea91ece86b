"""``model.fit`` under the clock, in Keras 2 and Keras 3, on any backend."""

import keras

from benchmarks.clock import EnoughSteps


class _Timer(keras.callbacks.Callback):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def on_train_batch_begin(self, batch, logs=None):
        if self.clock.seconds:  # the first step began with fit
            self.clock.begin()

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])  # waits for the step
        self.clock.end()
        if self.clock.done:
            raise EnoughSteps


def timed_fit(model, clock, *data, **arguments):
    """Runs ``model.fit(*data, **arguments)`` until the clock has enough steps.

    What ``fit`` does before its first step counts as a part of it.
    """
    clock.begin()
    try:
        model.fit(*data, epochs=1, verbose=0, callbacks=[_Timer(clock)], **arguments)
    except EnoughSteps:
        return
    raise RuntimeError(f"The data ended after {len(clock.seconds)} of {clock.steps} steps.")


def repeated_batch(x, y):
    """A ``tf.data.Dataset`` without end that gives one batch of a fixed size again and again."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensors((x, y)).repeat()


def compile_classifier(model, optimizer, reduction="sum_over_batch_size", **arguments):
    """Compiles with the cross entropy of integer labels and logits."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(optimizer=optimizer, loss=loss, **arguments)
