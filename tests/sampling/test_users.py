"""Draws of users: the law, the bound on what one user gives, and the layout."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_dp
from keras_dp.sampling import PoissonSampler
from tests.sampling.drawing import assert_frequency, is_padding, seeded

IDS = np.array(["u", "v", "u", "w", "u", "w", "x", "u", "w", "x"])  # u has 4, v 1, w 3, x 2


@pytest.fixture(scope="module")
def lines():
    """20,000 draws: the examples of each drawn user, [draws] lists of [users, 2], -1 is none."""
    sampler = seeded(np.arange(10), users=IDS, examples_per_user=2, batch_size=1)
    draws = []
    for step in range(20_000):
        x, _, weight = sampler[step % 4]
        draws.append(np.where(is_padding(weight), -1, x).reshape(-1, 2))
    return draws


def test_rows_of_a_user_stand_together_and_are_at_most_k(lines):
    for draw in lines[:500]:
        real = draw[draw[:, 0] >= 0]
        users = [set(IDS[row[row >= 0]]) for row in real]
        assert all(len(one) == 1 for one in users)
        assert len(set().union(*users)) == len(users)  # nobody twice
        assert not np.any(draw[len(real) :] >= 0)
        assert all(row[0] < row[1] for row in real if row[1] >= 0)


def test_each_user_is_drawn_with_probability_q_independently(lines):
    member = np.array([[np.any(IDS[d[d >= 0]] == user) for user in "uvwx"] for d in lines])
    assert_frequency(member.mean(0), 0.25, len(lines))
    both = (member.T.astype(float) @ member) / len(lines)
    assert_frequency(both[~np.eye(4, dtype=bool)], 0.25**2, len(lines))
    assert_frequency(member[:-1].T.astype(float) @ member[1:] / len(lines), 0.25**2, len(lines))


def test_each_example_of_a_user_is_as_likely(lines):
    counts = np.bincount(np.concatenate([d[d >= 0] for d in lines]), minlength=10)
    size = np.array([4, 1, 4, 3, 4, 3, 2, 4, 3, 2])
    assert_frequency(counts / len(lines), 0.25 * np.minimum(1, 2 / size), len(lines))
    pairs = [tuple(row) for d in lines for row in d if row[0] in (0, 2, 4, 7) and row[1] >= 0]
    frequencies = [pairs.count(p) / len(pairs) for p in itertools.combinations((0, 2, 4, 7), 2)]
    assert_frequency(np.array(frequencies), 1 / 6, len(pairs))


@pytest.mark.parametrize("number", [1, 2, 5, 6])
def test_subsets_are_uniform(number):
    subsets = keras_dp.sampling.users._subsets
    generator = np.random.default_rng(0)
    chosen = subsets(np.full(30_000, 7), number, generator)
    assert chosen.min() >= 0 and chosen.max() <= 6 and np.all(np.diff(chosen, axis=1) > 0)
    kinds, counts = np.unique(chosen, axis=0, return_counts=True)
    expected = len(list(itertools.combinations(range(7), number)))
    assert len(kinds) == expected
    assert_frequency(counts / 30_000, 1 / expected, 30_000)


@given(
    ids=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    limit=st.integers(1, 8),
    seed=st.integers(0, 9),
)
def test_whatever_the_ids_a_line_holds_one_user_and_no_more_than_the_limit(ids, limit, seed):
    users = keras_dp.sampling.users.Users(ids)
    lines = users.choose(np.arange(users.number), limit, np.random.default_rng(seed))
    names = np.unique(ids)
    assert lines.shape == (len(names), limit)
    for name, line in zip(names, lines):
        real = line[line >= 0]
        assert len(real) == min(limit, ids.count(name)) and np.all(line[len(real) :] == -1)
        assert {ids[i] for i in real} == {name} and len(set(real.tolist())) == len(real)


def test_numbers_count_users():
    sampler = PoissonSampler(np.arange(10), users=IDS, examples_per_user=3, batch_size=2)
    assert (sampler.unit, sampler.num_units, sampler.num_examples) == ("user", 4, 10)
    assert sampler.sampling_probability == 0.5 and len(sampler) == 2 and sampler.capacity == 4
    x, _, weight = sampler[0]
    assert x.shape == weight.shape == (12,)
    assert "num_users=4, examples_per_user=3" in repr(sampler)
    plain = PoissonSampler(np.arange(10), batch_size=2)
    assert (plain.unit, plain.num_units, plain.examples_per_user) == ("example", 10, None)


def test_all_of_a_user_with_weights_and_targets():
    weights = np.linspace(1, 2, 10)
    sampler = PoissonSampler(
        {"a": np.arange(10)}, IDS, weights, users=IDS, examples_per_user=4, batch_size=4
    )
    x, y, weight = sampler[0]
    real = ~is_padding(weight)
    expected = [0, 2, 4, 7, 1, -1, -1, -1, 3, 5, 8, -1, 6, 9, -1, -1]
    assert np.where(real, x["a"], -1).tolist() == expected
    np.testing.assert_allclose(weight[real], weights[x["a"][real]], rtol=1e-6)
    assert y.numpy()[real].tolist() == [u.encode() for u in IDS[x["a"][real]]]
    assert not x["a"][~real].any() and set(y.numpy()[~real]) == {b""}


def test_more_users_than_the_capacity_holds():
    sampler = PoissonSampler(
        np.arange(60), users=np.arange(60) // 2, examples_per_user=2, batch_size=29, capacity=9
    )
    x, _, weight = sampler[0]
    assert len(x) % 18 == 0 and np.sum(~is_padding(weight)) > 36


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(users=IDS), "examples_per_user=None"),
        (dict(examples_per_user=2), "users=None"),
        (dict(users=IDS[:9], examples_per_user=2), "9 ids for 10 examples"),
        (dict(users=IDS.reshape(5, 2), examples_per_user=2), r"\(5, 2\)"),
        (dict(users=IDS, examples_per_user=0), "examples_per_user.*>= 1"),
        (dict(users=IDS, examples_per_user=2, batch_size=5), "batch_size=5.*4 users"),
        (dict(users=np.r_[np.arange(9.0), np.nan], examples_per_user=1), "1 examples.*NaN"),
        (dict(users=[1, 2, math.nan, 1, "a", 2, 1, None, 0, 1], examples_per_user=1), "2 examples"),
        (dict(users=np.array(["a", None] * 5, object), examples_per_user=1), "5 examples"),
    ],
)
def test_bad_users_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        PoissonSampler(np.arange(10), **{"batch_size": 1, **arguments})
