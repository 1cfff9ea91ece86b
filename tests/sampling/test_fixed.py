"""Fixed batches of streams: every example once a pass, and the epsilon of that."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp import FixedBatches, PrivacyError
from keras_dp.padding import real_rows
from tests.sampling.drawing import is_padding

N = 23


def pairs():
    return ((np.float32([i, 1]), i) for i in range(N))


def dataset():
    return tf.data.Dataset.from_generator(
        pairs, output_signature=(tf.TensorSpec((2,), tf.float32), tf.TensorSpec((), tf.int64))
    )


STREAMS = {
    "dataset": dataset,
    "function": lambda: pairs,
    "list": lambda: list(pairs()),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_pass_has_every_example_once_and_fills_its_last_batch(kind):
    batches = FixedBatches(STREAMS[kind](), batch_size=5, num_examples=N)
    assert len(batches) == 5
    for _ in range(2):
        seen = []
        for x, y, weight in batches:
            real = ~is_padding(weight)
            assert len(x) == len(y) == len(weight) == 5 and weight.dtype == np.float32
            assert np.array_equal(real_rows(weight), real) and np.all(weight[real] == 1)
            np.testing.assert_array_equal(x[real, 0], y[real])
            seen += y[real].tolist()
        assert seen == list(range(N)) and real.sum() == 3
        assert not x[~real].any() and not y[~real].any()


def test_nested_examples_with_weights_and_text():
    def examples():
        for i in range(4):
            yield {"text": f"t{i}", "rest": (np.int8(i),)}, {"u": i, "v": 1.0}, {"u": i, "v": 2.0}

    batches = FixedBatches(examples, batch_size=3, num_examples=4)
    (x, y, weight), (_, _, last) = batches
    assert x["text"].numpy().tolist() == [b"t0", b"t1", b"t2"] and x["rest"][0].dtype == np.int8
    assert y["u"].tolist() == [0, 1, 2] and weight["u"].tolist() == [0, 1, 2]
    assert is_padding(last["u"]).tolist() == is_padding(last["v"]).tolist() == [False, True, True]
    for x, y, _ in FixedBatches(tf.data.Dataset.range(4), batch_size=4, num_examples=4):
        assert x.tolist() == [0, 1, 2, 3] and y == ()


@pytest.mark.parametrize("kind", STREAMS)
def test_fit_updates_once_for_every_batch_and_logs_epsilon(kind):
    seen = []

    class Model(keras.Model):
        def train_step(self, data):
            tf.numpy_function(lambda y, w: seen.append(y[~is_padding(w)].tolist()), data[1:], [])
            return super().train_step(data)

    batches = FixedBatches(STREAMS[kind](), batch_size=5, num_examples=N)
    inputs = keras.Input((2,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    optimizer = keras_dp.DPSGD(1e-3, l2_norm_clip=1.0, noise_multiplier=2.0, batch_size=5)
    model.compile(optimizer, "mse", jit_compile=False)
    logger = keras_dp.callbacks.EpsilonLogger(batches, delta=1e-3, verbose=0)
    history = model.fit(batches, epochs=2, callbacks=[logger], verbose=0).history
    assert int(optimizer.iterations) == 10
    for epoch in range(2):
        assert sum(seen[5 * epoch : 5 * epoch + 5], []) == list(range(N))
    expected = [
        keras_dp.compute_epsilon(
            num_examples=N, batch_size=5, noise_multiplier=2.0, delta=1e-3, epochs=epochs,
            sampling="shuffle",
        )
        for epochs in (1, 2)
    ]  # fmt: skip
    np.testing.assert_allclose(history["epsilon"], expected)


def test_keras_goes_on_in_the_stream_where_it_stopped():
    seen = []

    class Model(keras.Model):
        def train_step(self, data):
            tf.numpy_function(lambda y: seen.append(int(y[0])), [data[1]], [])
            return super().train_step(data)

    inputs = keras.Input((2,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    model.fit(
        FixedBatches(pairs, batch_size=5, num_examples=N), epochs=2, steps_per_epoch=2, verbose=0
    )
    assert seen == [0, 5, 10, 15]


@pytest.mark.parametrize(
    "number, batch_size, words",
    [
        (N + 1, 5, "gave only 23 examples, but num_examples=24"),
        (N - 1, 5, "gave more examples, but num_examples=22"),
        (20, 5, "gave more examples, but num_examples=20"),
        (25, 5, "gave only 23 examples"),
        (30, 5, "gave only 23 examples"),
    ],
)
@pytest.mark.parametrize("kind", STREAMS)
def test_a_wrong_number_of_examples_is_told(kind, number, batch_size, words):
    """Epsilon of a pass is that of the updates in it; with another number it would be wrong."""
    batches = FixedBatches(STREAMS[kind](), batch_size=batch_size, num_examples=number)
    with pytest.raises(PrivacyError, match=words):
        list(batches)


def test_streams_that_never_end_or_are_batched():
    with pytest.raises(PrivacyError, match=r"no repeat\(\)"):
        list(FixedBatches(dataset().repeat(), batch_size=5, num_examples=N))
    with pytest.raises(PrivacyError, match=r"unbatch\(\)"):
        list(FixedBatches(dataset().batch(5, True), batch_size=2, num_examples=N))


def test_examples_that_differ_are_told():
    def ragged():
        return (np.zeros(1 if i < 4 else 2) for i in range(8))

    with pytest.raises(ValueError, match="one structure, shape and dtype"):
        list(FixedBatches(ragged, batch_size=4, num_examples=8))


@pytest.mark.parametrize(
    "stream, arguments, error, words",
    [
        (pairs(), {}, TypeError, "only once.*make_examples"),
        (5, {}, TypeError, "int cannot be iterated"),
        (pairs, dict(batch_size=24), ValueError, "batch_size=24.*23 examples"),
        (pairs, dict(batch_size=0), ValueError, "batch_size"),
        (pairs, dict(num_examples=None), TypeError, "num_examples"),
        (pairs, dict(workers=3), ValueError, "one reader"),
    ],
)
def test_bad_arguments_are_named(stream, arguments, error, words):
    with pytest.raises(error, match=words):
        FixedBatches(stream, **{"batch_size": 5, "num_examples": N, **arguments})
