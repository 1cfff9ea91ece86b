"""Forms joined over several uses of one weight: norms and sums against explicit gradients."""

import numpy as np
import pytest
import tensorflow as tf

from keras_dp.clipping import forms

BATCH, VOCABULARY, DEPTH = 3, 50, 20


def _rows(rng, positions=4, scale=1.0):
    ids = rng.integers(0, VOCABULARY, (BATCH, positions))
    e = scale * rng.normal(size=(BATCH, positions, DEPTH))
    return forms.Rows(tf.constant(ids, tf.int32), tf.constant(e, tf.float32), (VOCABULARY, DEPTH))


def _product(rng, positions=3, scale=1.0, layout=forms.IN_ORDER):
    a = scale * rng.normal(size=(BATCH, 1, positions, VOCABULARY))
    g = rng.normal(size=(BATCH, 1, positions, DEPTH))
    return forms.Product(
        tf.constant(a, tf.float32), tf.constant(g, tf.float32), (VOCABULARY, DEPTH), layout
    )


def _explicit(uses):
    """The summed gradients ``[batch, V, D]`` in float64, by loops over positions."""
    total = np.zeros((BATCH, VOCABULARY, DEPTH))
    for form in uses:
        if isinstance(form, forms.Rows):
            for i in range(BATCH):
                for k, e in zip(form.ids.numpy()[i], form.g.numpy()[i].astype(np.float64)):
                    total[i, k] += e
        else:
            a, g = form.a.numpy()[:, 0], form.g.numpy()[:, 0]
            total += np.einsum("btv,btd->bvd", a.astype(np.float64), g)
    return total


def _check(form, uses):
    want = _explicit(uses)
    norms = np.sum(np.square(want), (1, 2))
    np.testing.assert_allclose(form.squared_norms(), norms, rtol=5e-5)
    factors = tf.constant([0.5, 2.0, 0.0])
    got = form.weighted_sum(factors, form.tensors())
    np.testing.assert_allclose(got, np.einsum("bvd,b->vd", want, factors.numpy()), atol=2e-5)
    np.testing.assert_allclose(form.per_example(), want, atol=2e-5)


@pytest.mark.parametrize("read, multiplied", [(1, 1), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("positions", [(1, 1), (4, 3), (1, 3), (4, 1)])
def test_rows_and_products_of_one_table(read, multiplied, positions):
    rng = np.random.default_rng(0)
    uses = [_rows(rng, positions[0]) for _ in range(read)]
    uses += [_product(rng, positions[1]) for _ in range(multiplied)]
    rng.shuffle(uses)
    form = forms.merge(uses)
    assert isinstance(form, forms.Tied)
    _check(form, uses)


def test_grouped_uses():
    """Rows 0 and 1 are one example, 2 and 3 another."""
    rng = np.random.default_rng(1)
    ids = tf.constant(rng.integers(0, VOCABULARY, (4, 2)), tf.int32)
    e = tf.constant(rng.normal(size=(4, 2, DEPTH)), tf.float32)
    a = tf.constant(rng.normal(size=(4, 1, 3, VOCABULARY)), tf.float32)
    g = tf.constant(rng.normal(size=(4, 1, 3, DEPTH)), tf.float32)
    shape = (VOCABULARY, DEPTH)
    form = forms.Tied(forms.Rows(ids, e, shape), forms.Product(a, g, shape))
    want = form.per_example().numpy().reshape(2, 2, *shape).sum(1)
    grouped = form.grouped(2)
    np.testing.assert_allclose(grouped.squared_norms(), np.sum(np.square(want), (1, 2)), rtol=5e-5)
    np.testing.assert_allclose(grouped.per_example(), want, atol=1e-5)


def test_many_positions_make_the_table_itself():
    """With more positions than features the table of an example is the smaller thing."""
    rng = np.random.default_rng(2)
    uses = [_rows(rng), _product(rng, positions=40)]
    form = forms.merge(uses)
    assert isinstance(form, forms.PerExample)
    _check(form, uses)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("positions", [1, 4])
def test_uses_that_cancel_are_not_taken_for_small(scale, positions):
    """Reading and multiplying undo each other up to rounding: the clipped sum is within C."""
    rng = np.random.default_rng(3)
    product = _product(rng, positions, scale)
    table = np.einsum("btv,btd->bvd", product.a.numpy()[:, 0], product.g.numpy()[:, 0])
    ids = tf.constant(np.tile(np.arange(VOCABULARY), (BATCH, 1)), tf.int32)
    rows = forms.Rows(ids, tf.constant(-table, tf.float32), (VOCABULARY, DEPTH))
    form = forms.merge([rows, product])
    assert isinstance(form, forms.Tied)
    norms = np.sqrt(form.squared_norms().numpy())
    true = np.sqrt(np.sum(np.square(_explicit([rows, product])), (1, 2)))
    assert np.all(norms >= true)
    for i in range(BATCH):
        factors = np.zeros(BATCH, "float32")
        factors[i] = 1 / norms[i]  # clipped to C = 1
        clipped = form.weighted_sum(tf.constant(factors), form.tensors())
        assert np.linalg.norm(clipped) <= 1


@pytest.mark.parametrize("size", [1.0, 1e8])
def test_a_row_and_a_logit_that_cancel(size):
    """At one position each, where the squares by themselves are exact."""
    rng = np.random.default_rng(6)
    g = size * rng.normal(size=(64, 1, DEPTH))
    e = -g * (1 + 1e-5 * rng.normal(size=g.shape))
    ids = tf.constant(rng.integers(0, VOCABULARY, (64, 1)), tf.int32)
    shape = (VOCABULARY, DEPTH)
    rows = forms.Rows(ids, tf.constant(e, tf.float32), shape)
    g = tf.constant(g[:, None], tf.float32)
    product = forms.Product(tf.one_hot(ids, VOCABULARY)[:, None], g, shape)
    left = np.float64(rows.g[:, 0]) + np.float64(g[:, 0, 0])
    norms = np.sqrt(forms.merge([rows, product]).squared_norms().numpy())
    assert np.all(norms >= np.linalg.norm(left, axis=1))


def test_a_kernel_and_its_transpose_are_not_joined():
    """Square shapes agree; the layouts do not."""
    rng = np.random.default_rng(4)
    a = [tf.constant(rng.normal(size=(BATCH, 1, 2, 5)), tf.float32) for _ in range(4)]
    plain = forms.Product(a[0], a[1], (5, 5))
    other = forms.Product(a[2], a[3], (5, 5), forms.Layout((5, 5), (1, 0)))
    want = np.einsum("bti,btj->bij", a[0][:, 0], a[1][:, 0])
    want += np.einsum("bti,btj->bji", a[2][:, 0], a[3][:, 0])
    form = forms.merge([plain, other])
    np.testing.assert_allclose(form.per_example(), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(form.squared_norms(), np.sum(want**2, (1, 2)), rtol=1e-5)


def test_one_layout_written_twice_is_joined():
    """A rule makes its layout anew for every use."""
    rng = np.random.default_rng(5)
    sizes = (VOCABULARY, DEPTH)
    uses = [_product(rng, layout=forms.Layout(sizes, (0, 1))) for _ in range(2)]
    form = forms.merge(uses)
    assert isinstance(form, forms.Product)
    assert form.a.shape[2] == 6
    _check(form, uses)
    other = _product(rng, layout=forms.Layout((VOCABULARY // 2, 2, DEPTH), (1, 0, 2)))
    assert not isinstance(forms.merge([uses[0], other]), forms.Product)
