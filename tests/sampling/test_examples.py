"""Functions of an example: what they get, what becomes of it, and their random numbers."""

import threading
import time

import keras
import numpy as np
import pytest

from keras_dp.sampling import PoissonSampler
from tests.sampling.drawing import is_padding, seeded

X, Y = np.arange(60, dtype=np.int64), np.arange(60) % 3


class Items:
    def __init__(self):
        self.readers, self.threads = 0, set()

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if not isinstance(index, int):
            raise TypeError("one at a time")
        self.readers += 1
        assert self.readers == 1 or self.threads, "several threads at a time"
        time.sleep(1e-4)
        self.readers -= 1
        return {"a": X[index], "b": Y[index]}


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_each_drawn_example_is_changed(threads):
    def change(x, y):
        return {"twice": 2 * x, "pair": np.float32([x, y])}, np.float16(y)

    sampler = PoissonSampler(X, Y, batch_size=20, map_fn=change, threads=threads)
    for _ in range(3):
        x, y, weight = sampler[0]
        n = np.sum(~is_padding(weight))
        assert n > 0 and x["pair"].dtype == np.float32 and y.dtype == np.float16
        assert np.all(weight[:n] == 1) and np.all(is_padding(weight[n:]))
        np.testing.assert_array_equal(2 * x["pair"][:n, 0], x["twice"][:n])
        np.testing.assert_array_equal(x["twice"][:n] // 2 % 3, y[:n])
        assert not x["twice"][n:].any() and not y[n:].any()


@pytest.mark.parametrize(
    "function, parts",
    [
        (lambda e: e["a"], 1),
        (lambda e: (e["a"],), 1),
        (lambda e: (e["a"], e["b"]), 2),
        (lambda e: (e["a"], e["b"], 0.5), 3),
    ],
)
def test_what_it_returns_is_what_keras_takes_for_an_example(function, parts):
    x, y, weight = PoissonSampler(Items(), batch_size=60, map_fn=function)[0]
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y if parts > 1 else ())
    assert np.all(weight == (0.5 if parts == 3 else 1)) and weight.dtype == np.float32


def test_weights_go_through():
    def change(x, y, weight):
        return x, y, weight * 10

    sampler = PoissonSampler(X, Y, X / 4, batch_size=60, map_fn=change, class_weight={0: 2.0})
    x, y, weight = sampler[0]
    np.testing.assert_allclose(weight, X * 2.5 * np.where(Y == 0, 2, 1))


def test_texts_and_users():
    def change(x, y):
        return {"text": f"number {x}"}, y

    ids = X // 4
    sampler = PoissonSampler(
        X, Y, batch_size=8, users=ids, examples_per_user=3, map_fn=change, physical_batch_size=8
    )
    for piece, y, weight in sampler:
        real = ~is_padding(weight)
        words = [text.decode() for text in piece.x["text"].numpy()[real]]
        assert [int(word.split()[1]) % 3 for word in words] == y[real].tolist()


def test_what_it_gets_may_differ_in_shape():
    """Images of several sizes, texts, lists: the function makes one shape of them."""

    class Photos(Items):
        def __getitem__(self, index):
            return np.full((index % 3 + 1, 2), index), ["cat"] * (index + 1)

    def change(image, words):
        return np.resize(image, (4,)), len(words) - 1

    x, y, _ = PoissonSampler(Photos(), batch_size=60, map_fn=change)[0]
    np.testing.assert_array_equal(x, np.repeat(X[:, None], 4, axis=1))
    np.testing.assert_array_equal(y, X)
    rows = np.array([list(range(i + 1)) for i in range(60)], object)
    x, y, _ = PoissonSampler(rows, X, batch_size=60, map_fn=lambda x, y: (sum(x), y))[0]
    np.testing.assert_array_equal(x, X * (X + 1) // 2)
    with pytest.raises(ValueError, match="one shape"):
        PoissonSampler(Photos(), batch_size=60)[0]


def test_an_empty_draw_has_the_shapes_of_the_function():
    sampler = PoissonSampler(X, batch_size=1, map_fn=lambda x: {"a": np.ones((3, x * 0 + 2))})
    batches = (sampler[0] for _ in range(100))
    x, _, weight = next(b for b in batches if is_padding(b[2]).all())
    assert x["a"].shape == (sampler.capacity, 3, 2) and not x["a"].any()


def noisy(x, y, rng):
    return {"x": x, "noise": rng.random(2)}, y


def noise_of(batch):
    x, _, weight = batch
    return x["noise"][~is_padding(weight)]


def test_random_numbers_are_those_of_the_seed_whatever_the_threads():
    one, same, other = (
        seeded(X, Y, batch_size=20, map_fn=noisy, seed=seed, threads=threads)
        for seed, threads in [(1, 1), (1, 4), (2, 4)]
    )
    for _ in range(3):
        a, b, c = (noise_of(sampler[0]) for sampler in (one, same, other))
        np.testing.assert_array_equal(a, b)
        assert not np.isin(a, c).any()


def test_random_numbers_are_never_used_twice():
    for physical in (None, 8):
        sampler = PoissonSampler(X, Y, batch_size=20, map_fn=noisy, physical_batch_size=physical)
        batches = [batch for _ in range(20) for batch in sampler]
        if physical:
            batches = [(piece.x, y, weight) for piece, y, weight in batches]
        noise = np.concatenate([noise_of(batch) for batch in batches]).reshape(-1)
        assert len(noise) > 1000 and len(np.unique(noise)) == len(noise)
    a, b = (noise_of(PoissonSampler(X, Y, batch_size=60, map_fn=noisy)[0]) for _ in range(2))
    assert not np.isin(a, b).any()


def test_the_function_runs_in_threads_and_the_source_is_read_by_one():
    seen, barrier = set(), threading.Barrier(2, timeout=20)

    def change(example):
        if threading.current_thread() is not threading.main_thread() and len(seen) < 2:
            seen.add(threading.current_thread().name)
            barrier.wait()  # passes only when two threads are here at the same time
        return example["a"]

    source = Items()
    sampler = PoissonSampler(source, batch_size=60, map_fn=change)
    sampler._batches._examples._threads._number = 4  # whatever this machine has
    np.testing.assert_array_equal(sampler[0][0], X)
    assert len(seen) == 2
    # With `threads` the source is read by several at a time.
    source.threads = {"allowed"}
    np.testing.assert_array_equal(PoissonSampler(source, batch_size=60, threads=4)[0][0]["a"], X)


@pytest.mark.parametrize("workers", [dict(workers=2), dict(workers=2, use_multiprocessing=True)])
def test_functions_in_fit(workers):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    sampler = PoissonSampler(
        X, Y, batch_size=20, map_fn=lambda x, y: (np.float32([x, y]), y), **workers
    )
    model.fit(sampler, epochs=2, verbose=0)
    model.fit(sampler.as_tf_dataset(), shuffle=False, verbose=0)
    assert model.optimizer.iterations == 9


@pytest.mark.parametrize(
    "function, error, words",
    [
        (3, TypeError, "map_fn must be a function.*3"),
        (lambda x: np.zeros(int(x) % 2 + 1), ValueError, r"x must give rows of one shape"),
        (lambda x: {"a": x} if x == 0 else {"b": x}, ValueError, r"map_fn\(example"),
        (lambda x: (x, x) if x == 0 else x, ValueError, "structure"),
        (lambda x: (x, x, "heavy"), TypeError, "sample_weight must hold numbers"),
        (lambda x: (x, {"a": x}, {"b": 1.0}), ValueError, "structure of y"),
        (lambda x: 1 // int(x < 30), ZeroDivisionError, "by zero"),
    ],
)
def test_mistakes_in_the_function_are_told(function, error, words):
    with pytest.raises(error, match=words):
        PoissonSampler(X, batch_size=60, map_fn=function)[0]
