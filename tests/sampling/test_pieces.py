"""Draws in pieces: each arrives whole, once and in order, whatever Keras does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_dp import sampling
from keras_dp.errors import PrivacyError
from keras_dp.padding import real_rows
from keras_dp.pieces import Piece
from keras_dp.sampling import PoissonSampler
from tests.sampling.drawing import assert_frequency, is_padding, numbered, seeded


class Assembler(keras.Model):
    """Notes the pieces of each step, as (draw, position, last, examples)."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight()
        self.seen = []

    def call(self, x):
        return self.scale * tf.cast(x, tf.float32)

    def train_step(self, data):
        def note(x, draw, last, position, weight):
            examples = tuple(x[~is_padding(weight)].tolist())
            self.seen.append((int(draw[0]), int(position[0]), bool(last[0]), examples, len(x)))

        piece, y, weight = data
        tf.numpy_function(note, [*piece, weight], [])
        return super().train_step((piece.x, y, weight))


@pytest.fixture(scope="module")
def compiled():
    model = Assembler()
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.fixture
def model(compiled):
    compiled.seen.clear()
    return compiled


def complete(seen):
    """The examples of each draw whose pieces all arrived, by the rules of the private step."""
    updates, parts, current = [], [], None
    for draw, position, last, examples, _ in seen:
        if draw != current:
            parts, current = [], draw
        assert position == len(parts), "a piece was lost or came twice"
        parts.append(examples)
        if last:
            updates.append(sum(parts, ()))
            current = None
    return updates


def test_pieces_of_a_draw():
    sampler = numbered(1000, 100, physical_batch_size=32)
    assert sampler.capacity == 168 and sampler.pieces_per_draw == 6
    assert sampler.steps_per_epoch == 10 and len(sampler) == 60
    pieces = list(sampler)
    assert len(pieces) == 60 and sampler.updates_drawn == sampler.batches_drawn == 10
    for k, (piece, y, weight) in enumerate(pieces):
        assert isinstance(piece, Piece)
        assert piece.draw.dtype == piece.position.dtype == np.int64 and piece.last.dtype == bool
        # The same for every row, so that each replica that gets some rows gets them.
        assert piece.draw.shape == piece.position.shape == piece.last.shape == (32,)
        assert set(piece.position) == {k % 6} and set(piece.last) == {k % 6 == 5}
        assert len(set(piece.draw)) == 1
        assert len(piece.x) == len(y) == len(weight) == 32
    numbers = [int(piece.draw[0]) for piece, _, _ in pieces]
    assert len(set(numbers)) == 10 and all(len(set(numbers[k : k + 6])) == 1 for k in (0, 6, 54))


def test_pieces_together_follow_the_law_of_a_draw():
    sampler = seeded(np.arange(10), batch_size=3, steps_per_epoch=5000, physical_batch_size=2)
    member = np.zeros((5000, 10), bool)
    for k, (piece, _, weight) in enumerate(sampler):
        rows = piece.x[~is_padding(weight)]
        assert not member[k // 5, rows].any()  # nobody is in two pieces
        member[k // 5, rows] = True
    assert_frequency(member.mean(0), 0.3, 5000)
    both = member.T.astype(float) @ member / 5000
    assert_frequency(both[~np.eye(10, dtype=bool)], 0.09, 5000)
    assert_frequency(member[:-1].T.astype(float) @ member[1:] / 4999, 0.09, 4999)


def test_a_draw_above_capacity_has_a_longer_last_piece():
    sampler = numbered(40, 20, capacity=12, physical_batch_size=5)
    sizes = set()
    for _ in range(40):
        for piece, _, weight in sampler:
            last = bool(piece.last[0])
            assert len(piece.x) % 5 == 0 and (last or len(piece.x) == 5)
            if not last:
                assert not is_padding(weight).any() or piece.position > 0
            sizes.add(len(piece.x))
    assert max(sizes) >= 15
    examples = {}
    for piece, _, weight in sampler:
        examples.setdefault(int(piece.draw[0]), []).extend(piece.x[~is_padding(weight)])
    assert all(len(set(rows)) == len(rows) for rows in examples.values())


@given(
    drawn=st.integers(0, 60),
    capacity=st.integers(1, 40),
    physical=st.integers(1, 50),
    each=st.integers(1, 3),
)
def test_pieces_hold_exactly_what_was_drawn(drawn, capacity, physical, each):
    users = dict(users=np.arange(120) // 2, examples_per_user=each)
    sampler = PoissonSampler(
        np.arange(120), batch_size=8, steps_per_epoch=1, capacity=capacity,
        physical_batch_size=physical, **users,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling.poisson, "poisson_indices", lambda *_: np.arange(drawn))
        pieces = list(sampler)
    assert len(pieces) == len(sampler) == -(-capacity // physical)
    rows = [piece.x[~is_padding(weight)] for piece, _, weight in pieces]
    users_seen = [np.unique(part // 2) for part in rows]
    assert np.array_equal(np.concatenate(users_seen), np.arange(drawn))
    assert len(np.concatenate(rows)) == drawn * min(each, 2)
    sizes = [len(weight) for _, _, weight in pieces]
    assert set(sizes[:-1]) <= {physical * each} and sizes[-1] % (physical * each) == 0


def test_an_empty_draw_is_pieces_of_padding(monkeypatch):
    monkeypatch.setattr(sampling.poisson, "poisson_indices", lambda *_: np.arange(0))
    pieces = list(numbered(100, 10, physical_batch_size=8, steps_per_epoch=1))
    assert len(pieces) == 4
    assert all(not real_rows(weight).numpy().any() for _, _, weight in pieces)
    assert [bool(piece.last[0]) for piece, _, _ in pieces] == [False] * 3 + [True]


def several_fits(model, sampler):
    model.fit(sampler, epochs=2, verbose=0)
    model.fit(sampler, verbose=0)
    return 30


def not_shuffled(model, sampler):
    model.fit(sampler, epochs=2, shuffle=False, verbose=0)
    return 20


def steps_given(model, sampler):
    """Keras goes on with the same reader in the second epoch, in the middle of a draw."""
    for _ in range(2):
        model.fit(sampler, epochs=4, steps_per_epoch=15, verbose=0)
    return 20


def stopped_in_mid_epoch(model, sampler):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 9

    for _ in range(2):
        model.fit(sampler, epochs=3, callbacks=[Stop()], verbose=0)
    model.fit(sampler, verbose=0)
    return 12


def several_steps_at_once(model, sampler):
    model.compile("sgd", "mse", jit_compile=False, steps_per_execution=4)
    model.fit(sampler, epochs=2, verbose=0)
    model.compile("sgd", "mse", jit_compile=False)
    return 20


def static_datasets(model, sampler):
    model.fit(sampler.as_tf_dataset(), epochs=2, verbose=0)
    endless = sampler.as_tf_dataset(endless=True)
    model.fit(endless, epochs=2, steps_per_epoch=30, verbose=0)
    return 30


WAYS = [
    several_fits,
    not_shuffled,
    steps_given,
    stopped_in_mid_epoch,
    several_steps_at_once,
    static_datasets,
]


@pytest.mark.parametrize("way", WAYS)
def test_keras_gets_whole_draws(model, way):
    sampler = numbered(physical_batch_size=32)
    expected = way(model, sampler)
    updates = complete(model.seen)
    assert len(updates) == expected and len(set(updates)) == len(updates)
    assert len(set(sum((list(u) for u in updates), []))) > 600
    assert {size for *_, size in model.seen} == {32}


def test_by_hand_and_beside_each_other(model):
    sampler = numbered(physical_batch_size=32)
    model.seen.clear()
    for batch in sampler:
        model.train_on_batch(*batch)
    for number in range(12):
        model.train_on_batch(*sampler[number])
    assert len(complete(model.seen)) == 12
    # An iteration has draws of its own: another one does not take pieces from it.
    one, other = iter(sampler), iter(sampler)
    first = [next(reader)[0] for _ in range(6) for reader in (one, other)]
    assert [int(p.position[0]) for p in first] == [k // 2 for k in range(12)]
    assert len({int(p.draw[0]) for p in first}) == 2


def test_users_in_pieces():
    ids = np.arange(300) // 3
    sampler = PoissonSampler(
        np.arange(300), users=ids, examples_per_user=2, batch_size=20, physical_batch_size=8
    )
    users = []
    for piece, _, weight in sampler:
        assert piece.x.shape == weight.shape == (16,)
        lines, real = piece.x.reshape(8, 2), ~is_padding(weight).reshape(8, 2)
        assert np.array_equal(real[:, 0], real[:, 1])
        assert np.array_equal(ids[lines[real[:, 0], 0]], ids[lines[real[:, 0], 1]])
        users.append((int(piece.draw[0]), ids[lines[real[:, 0], 0]].tolist()))
    for draw in {number for number, _ in users}:
        drawn = sum((part for number, part in users if number == draw), [])
        assert len(set(drawn)) == len(drawn)


def test_the_static_dataset_has_static_pieces():
    sampler = numbered(physical_batch_size=32)
    piece, y, weight = sampler.as_tf_dataset().element_spec
    assert piece.x.shape == y.shape == weight.shape == (32,)
    assert piece.draw.shape == piece.last.shape == (32,)
    assert sampler.as_tf_dataset().cardinality() == 60


def test_a_static_dataset_stops_rather_than_cut_a_draw(monkeypatch):
    sampler = numbered(physical_batch_size=32)
    dataset = sampler.as_tf_dataset()
    monkeypatch.setattr(sampling.poisson, "poisson_indices", lambda *_: np.arange(193))
    with pytest.raises(tf.errors.OpError, match=f"{PrivacyError.__name__}.*draw of 193 examples"):
        list(dataset)


@pytest.mark.parametrize("workers", [dict(workers=2), dict(workers=1, use_multiprocessing=True)])
def test_parallel_readers_are_refused(workers):
    with pytest.raises(ValueError, match="one reader.*workers="):
        numbered(physical_batch_size=32, **workers)


@pytest.mark.parametrize("size, error", [(0, ValueError), (2.5, TypeError)])
def test_bad_sizes(size, error):
    with pytest.raises(error, match="physical_batch_size"):
        numbered(physical_batch_size=size)
