"""What the replicas of one machine get of each kind of data."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.sampling import draws
from tests.distribution import running
from tests.fixtures import zoo

PRIVACY = dict(l2_norm_clip=0.5, noise_multiplier=0.0, batch_size=8)


def _sgd(**kwargs):
    return keras_dp.DPSGD(0.5, **PRIVACY | kwargs)


class _ByIndex:
    """The same draw for the same index, however many batches Keras looks at before it trains."""

    def __init__(self):
        self.count = 0

    def next(self, index):
        self.count += 1
        return draws.Draws(100 + index).next(index)


def _seeded(*args, batch_size=8, **kwargs):
    sampler = keras_dp.PoissonSampler(*args, batch_size=batch_size, **kwargs)
    by_index = _ByIndex()
    sampler._own_draws = lambda: by_index
    return sampler


def _data(size=40):
    return zoo.batch(zoo.build("dense"), size=size)


def _on_both(make_data, make_optimizer=_sgd, replicas=2, **fit_args):
    """A model trained on several replicas, and one on one device."""
    models = [running.compiled(n, make_optimizer) for n in (replicas, 0)]
    for model in models:
        data = make_data()
        args = dict(epochs=2, verbose=0, shuffle=False) | fit_args
        if isinstance(data, tuple):
            model.fit(*data, batch_size=8, **args)
        else:
            model.fit(data, **args)
    running.assert_same(*models)
    running.assert_copies_agree(models[0])
    return models


def test_poisson_draws():
    """Also draws above the capacity, which are two batches' worth of rows, and empty ones."""
    x, y = _data()
    models = _on_both(lambda: _seeded(x, y, capacity=9))
    assert models[0].optimizer.released == 10


def test_poisson_pieces():
    x, y = _data()
    models = _on_both(lambda: _seeded(x, y, physical_batch_size=4, capacity=9))
    assert models[0].optimizer.released == 10


def test_empty_draws():
    """Batches of padding alone are updates, by weight decay here, and everything stays finite."""
    x, y = _data(1000)
    models = [
        running.compiled(
            n, lambda: keras_dp.DPAdamW(0.1, **PRIVACY | dict(batch_size=1), weight_decay=0.1)
        )
        for n in (2, 0)
    ]
    for model in models:
        sampler = _seeded(x, y, batch_size=1, steps_per_epoch=8)
        history = model.fit(sampler, epochs=1, shuffle=False, verbose=0).history
        assert np.all(np.isfinite(history["loss"]))
        assert int(model.optimizer.iterations.numpy()) == 8
    running.assert_same(*models)


def test_users_stay_whole():
    """Each user's rows are on one replica: else the user would be clipped twice, at C each."""
    x, y = _data()
    users = np.random.default_rng(1).integers(0, 16, 40)
    kwargs = dict(examples_per_user=3)
    _on_both(lambda: _seeded(x, y, users=users, **kwargs), lambda: _sgd(**kwargs))


@pytest.mark.parametrize("physical", [None, 5])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_rows_of_a_user_lie_in_one_share(replicas, physical):
    """Rows are told apart by x; what Keras splits evenly holds whole users, and padding evenly."""
    from keras_dp.sampling.shares import Share

    users = np.arange(60) // 3
    sampler = keras_dp.PoissonSampler(
        np.arange(60), users=users, examples_per_user=3, batch_size=9, physical_batch_size=physical
    )
    with sampler.delivered_to(Share(replicas=replicas)):
        batches = [batch for _ in range(5) for batch in sampler]
    for x, _, weight in batches:
        rows = x.x if physical else x
        shares = np.split(rows, replicas)  # fails unless they are equal
        real = [~np.signbit(w) for w in np.split(np.asarray(weight), replicas)]
        owners = [set(users[share[keep]]) for share, keep in zip(shares, real)]
        assert sum(map(len, owners)) == len(set.union(*owners))
        assert max(map(len, owners)) - min(map(len, owners)) <= 1
        assert all(len(share) % 3 == 0 for share in shares)


def test_arrays_that_would_split_a_user_are_refused():
    """8 rows, two users of four: two replicas would take one each, four replicas halves."""
    x, y = _data(8)
    make = lambda: _sgd(examples_per_user=4)  # noqa: E731
    models = [running.compiled(n, make) for n in (2, 4, 0)]
    start = models[0].get_weights()
    with pytest.raises(Exception, match="every replica's share"):
        models[1].fit(x, y, batch_size=8, verbose=0)
    for a, b in zip(models[1].get_weights(), start):
        np.testing.assert_array_equal(a, b)
    for model in (models[0], models[2]):
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    running.assert_same(models[0], models[2])


@pytest.mark.slow
def test_train_on_batch_keeps_users_whole():
    make = lambda: _sgd(examples_per_user=4)  # noqa: E731
    models = [running.compiled(n, make) for n in (4, 0)]
    x, y = _data(12)
    for model in models:
        model.train_on_batch(x, y)
    running.assert_same(*models)


def _weights(size):
    return np.random.default_rng(3).integers(0, 3, size).astype("float32")


@pytest.mark.slow
def test_sample_weights_of_uneven_batches():
    x, y = _data(17)
    _on_both(lambda: (x, y), replicas=4, sample_weight=_weights(17))


@pytest.mark.slow
def test_sample_weights_in_microbatches_with_class_weights():
    x, y = _data(17)
    _on_both(
        lambda: (x, y),
        lambda: _sgd(microbatch_size=2),
        class_weight={0: 1.0, 1: 0.0, 2: 3.0},
        validation_data=(x, y),
    )


@pytest.mark.slow
def test_padding_in_microbatches():
    x, y = _data()
    _on_both(lambda: _seeded(x, y), lambda: _sgd(microbatch_size=1))


@pytest.mark.slow
def test_fixed_batches():
    x, y = _data(17)
    stream = tf.data.Dataset.from_tensor_slices((x, y))
    _on_both(lambda: keras_dp.FixedBatches(stream, batch_size=8, num_examples=17))


@pytest.mark.slow
def test_a_dataset():
    x, y = _data(17)
    _on_both(lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(8))


@pytest.mark.parametrize("replicas", [0, 2])
def test_the_end_of_the_data_is_no_update(replicas):
    """Of a data set whose length nobody knows Keras begins a step that finds no batch."""
    x, y = _data(24)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).filter(lambda x, y: True)
    model = running.compiled(replicas, lambda: _sgd(noise_multiplier=1.0))
    model.fit(data, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == model.optimizer.released == 6
    model = running.compiled(replicas, lambda: _sgd(gradient_accumulation_steps=2))
    model.fit(data, epochs=1, verbose=0)
    assert model.optimizer.released == model.optimizer.parts_waiting == 1
    model.fit(data, epochs=2, verbose=0)
    assert model.optimizer.released == 4 and model.optimizer.parts_waiting == 0


@pytest.mark.slow
def test_a_generator():
    """Keras looks at its first batches and leaves them out, so all are equal here."""
    x, y = _data(5)
    _on_both(lambda: ((x, y) for _ in itertools.count()), steps_per_epoch=3)


EMPTY = {"layerwise": {}, "vectorized": dict(backend="vectorized")} | {
    "microbatches": dict(microbatch_size=2),
    "loop": dict(backend="loop"),
}


@pytest.mark.parametrize(
    "way, jit_compile",
    [(w, jit) for w in EMPTY for jit in (False, True) if (w, jit) != ("loop", 1)],
)
def test_shares_without_a_row(way, jit_compile):
    """Clipped sums of no example are zero, whoever finds and compiles them."""
    _assert_nothing("dense", jit_compile, **EMPTY[way])


def test_a_share_without_a_row_that_the_vectorizer_loops_over():
    _assert_nothing("conv2d", False, backend="vectorized")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(zoo.ZOO))
def test_rules_of_a_share_without_a_row(name):
    _assert_nothing(name, False)
    if name in zoo.FEW:
        _assert_nothing(name, False, backend="vectorized")


def _assert_nothing(name, jit_compile, **kwargs):
    model = zoo.build(name)
    model.compile(_sgd(**kwargs), loss=running.CROSSENTROPY)
    x, y = zoo.batch(model, size=2)
    signature = [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (x, y)]

    @tf.function(input_signature=signature, jit_compile=jit_compile)
    def sums(x, y):
        return keras_dp.clipped_gradients(model, x, y, optimizer=model.optimizer).sums

    for total, variable in zip(sums(x[:0], y[:0]), model.trainable_variables):
        np.testing.assert_array_equal(total, np.zeros(variable.shape))
    assert any(np.any(total) for total in sums(x, y))
