"""The same training on one device and on several replicas."""

import keras
import numpy as np
import tensorflow as tf

from keras_dp.distribution import get_strategy
from keras_dp.optimizers.base import private_optimizer
from tests.fixtures import zoo

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def strategy(replicas):
    """Of so many logical CPUs; for 0, one device and no strategy."""
    return get_strategy("mirrored", devices=replicas) if replicas else get_strategy()


def compiled(replicas, make_optimizer, make_model="dense", loss=CROSSENTROPY, **compile_args):
    """A compiled model, made in the scope; a name is one of the zoo."""
    with strategy(replicas).scope():
        keras.utils.set_random_seed(1)
        model = zoo.build(make_model) if isinstance(make_model, str) else make_model()
        model.compile(make_optimizer(), loss=loss, **compile_args)
    return model


def fit_unevenly(model, size=17, batch_size=8, epochs=2, **fit_args):
    """Batches of 8, 8 and 1 examples: in the end all replicas but one have no row."""
    x, y = zoo.batch(model, size=size)
    args = dict(batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0) | fit_args
    return model.fit(x, y, **args)


def state(model):
    """Every weight of the model and every variable of its optimizer, by name."""
    variables = [*model.variables, *private_optimizer(model).variables]
    found = {f"{k} {v.path}": np.array(v) for k, v in enumerate(variables)}
    return {name: value for name, value in found.items() if "seed" not in name}


def assert_same(model, one, tolerance=1e-5):
    """Equal states, relative to the largest entry of each variable."""
    got, want = state(model), state(one)
    assert len(got) == len(want) > 1
    for (name, a), b in zip(got.items(), want.values()):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(np.max(np.abs(b), initial=0), 1e-3)
        np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=0, err_msg=name)
    updates = [int(private_optimizer(m).iterations.numpy()) for m in (model, one)]
    assert updates[0] == updates[1] > 0


def assert_copies_agree(model):
    """Each device's copy of each variable has the same bits."""
    optimizer = private_optimizer(model)
    for variable in [*model.weights, *optimizer.variables]:
        copies = model.distribute_strategy.experimental_local_results(variable.value)
        assert len(copies) == model.distribute_strategy.num_replicas_in_sync
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy.numpy(), copies[0].numpy(), variable.path)


def steps(model, x, y, sample_weight=None, batch_size=8, times=1):
    """A custom loop: ``strategy.run`` of one step after the other on the shares of a batch."""
    import keras_dp

    distribute = model.distribute_strategy
    data = (x, y) if sample_weight is None else (x, y, sample_weight)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(batch_size)

    def step(*batch):
        clipped = keras_dp.clipped_gradients(model, *batch, optimizer=model.optimizer)
        model.optimizer.apply_gradients(clipped)
        return clipped.num_examples

    @tf.function
    def one(batch):
        return distribute.reduce("SUM", distribute.run(step, args=batch), axis=None)

    counted = 0
    for _ in range(times):
        for batch in distribute.experimental_distribute_dataset(batches):
            counted += int(one(batch))
    return counted
