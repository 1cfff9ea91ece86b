"""Padding rows are told from examples by the sign of a zero."""

import numpy as np
import tensorflow as tf

from keras_dp import padding


def test_only_negative_zero_is_padding():
    weight = np.float32([1, 0.0, -0.0, -1, np.nan, 1e-40])
    np.testing.assert_array_equal(padding.real_rows(weight), [True, True, False, True, True, True])
    assert np.signbit(padding.PADDING_WEIGHT) and padding.PADDING_WEIGHT == 0


def test_a_row_is_padding_when_every_output_says_so():
    weight = {"a": np.float32([-0.0, -0.0, 1]), "b": np.float32([[-0.0, -0.0], [-0.0, 0], [0, 0]])}
    for run in (padding.real_rows, tf.function(padding.real_rows, jit_compile=True)):
        np.testing.assert_array_equal(run(weight), [False, True, True])


def test_no_weights_no_padding():
    assert padding.real_rows(None) is None
