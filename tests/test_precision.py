"""Where float32 products would be rounded, that is turned off before anything is clipped."""

import warnings

import pytest
import tensorflow as tf

import keras_dp
from keras_dp import precision


@pytest.fixture
def tf32():
    tf.config.experimental.enable_tensor_float_32_execution(True)
    yield tf.config.experimental.tensor_float_32_execution_enabled
    tf.config.experimental.enable_tensor_float_32_execution(True)


def _optimizer():
    return keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8)


def test_a_gpu_gets_full_products_and_is_told_once(tf32, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU:0"])
    with pytest.warns(UserWarning, match="weigh more than l2_norm_clip"):
        _optimizer()
    assert not tf32()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _optimizer()


def test_a_cpu_is_left_alone(tf32):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _optimizer()
    assert tf32()


def test_a_tpu_gets_full_products(tf32):
    with pytest.warns(UserWarning, match="full precision"):
        precision.ensure_float32_products()
    assert not tf32()
