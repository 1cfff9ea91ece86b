"""``get_strategy`` by name, and what no DP optimizer trains under."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.distribution import get_strategy
from tests.distribution import running
from tests.fixtures import checks


def _sgd(**kwargs):
    args = dict(l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=2) | kwargs
    return keras_dp.DPSGD(1.0, **args)


def test_default_is_one_device():
    assert get_strategy() is tf.distribute.get_strategy()
    model = running.compiled(0, _sgd, lambda: checks.linear_model("sgd"), loss="mse")
    assert model.distribute_strategy.num_replicas_in_sync == 1


@pytest.mark.parametrize("devices, replicas", [(None, 4), (1, 1), (3, 3), (["CPU:1", "CPU:2"], 2)])
def test_mirrored_devices(devices, replicas):
    strategy = get_strategy("mirrored", devices)
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == replicas


def test_the_same_devices_give_the_same_strategy():
    assert get_strategy("mirrored", 2) is get_strategy("mirrored", ["CPU:0", "CPU:1"])


@pytest.mark.parametrize("devices", [99, 0, -1, True])
def test_a_number_of_devices_that_are_not_there(devices):
    with pytest.raises(ValueError, match=r"devices must be from 1 to 4, the CPUs .* Logical CPUs"):
        get_strategy("mirrored", devices)


@pytest.mark.parametrize("name", ["Mirrored", "parameter_server", None, 3])
def test_other_names(name):
    with pytest.raises(ValueError, match="'default', 'mirrored', 'multi_worker', 'tpu'. Received"):
        get_strategy(name)


def test_arguments_of_another_strategy():
    with pytest.raises(ValueError, match="devices is for the strategy 'mirrored'"):
        get_strategy("tpu", devices=2)
    with pytest.raises(ValueError, match="tpu is for the strategy 'tpu', not 'mirrored'"):
        get_strategy("mirrored", tpu="local")


def test_no_tpu():
    with pytest.raises(ValueError, match="No TPU was found by the name 'nowhere'"):
        get_strategy("tpu", tpu="nowhere")


@pytest.mark.parametrize("config", [None, "{", '{"cluster": {}}'])
def test_multi_worker_without_a_cluster(monkeypatch, config):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match="needs the environment variable TF_CONFIG, such as"):
        get_strategy("multi_worker")


def test_one_device_strategy_trains():
    with tf.distribute.OneDeviceStrategy("CPU:1").scope():
        checks.check_lin(_sgd())


def _central():
    return tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")


def test_an_optimizer_in_the_scope_of_another_strategy():
    with _central().scope():
        with pytest.raises(keras_dp.PrivacyError, match="train under CentralStorageStrategy. Use"):
            _sgd()


def test_a_model_in_the_scope_of_another_strategy():
    optimizer = _sgd()
    with _central().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    with pytest.raises(keras_dp.PrivacyError, match="train under CentralStorageStrategy. Use"):
        model.fit(checks.LIN_X, checks.LIN_Y, verbose=0)


@pytest.mark.slow
def test_parameter_servers():
    """In a process of its own, which has to be a cluster."""
    program = """
import socket, tensorflow as tf, keras_dp
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
cluster = tf.train.ClusterSpec({k: [f"127.0.0.1:{port()}"] for k in ("worker", "ps")})
servers = [tf.distribute.Server(cluster, k, 0, protocol="grpc") for k in ("worker", "ps")]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
with tf.distribute.ParameterServerStrategy(resolver).scope():
    try:
        keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4)
    except keras_dp.PrivacyError as error:
        print("refused:", error, flush=True)
import os
os._exit(0)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "refused: DP optimizers do not train under ParameterServerStrategy" in ran.stdout, (
        ran.stderr
    )


def _linear():
    return keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )


def _fit(model):
    before = model.get_weights()
    with pytest.raises(keras_dp.PrivacyError) as error:
        model.fit(checks.LIN_X, checks.LIN_Y, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    return str(error.value)


def test_an_optimizer_made_outside_the_scope():
    optimizer = _sgd()
    with running.strategy(2).scope():
        model = _linear()
        model.compile(optimizer, loss="mse")
    assert "The optimizer was made outside the scope of the MirroredStrategy" in _fit(model)


def test_a_model_made_outside_the_scope():
    model = _linear()
    with running.strategy(2).scope():
        model.compile(_sgd(), loss="mse")
    assert "The optimizer was made in the scope of a strategy, but" in _fit(model)


def test_a_model_made_outside_the_scope_in_a_custom_loop():
    model = _linear()
    with running.strategy(2).scope():
        optimizer = _sgd()

    def step(x, y):
        clipped = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer, loss=_product)
        optimizer.apply_gradients(clipped)

    shares = running.strategy(2).experimental_distribute_values_from_function(
        lambda context: tf.constant(checks.LIN_X[context.replica_id_in_sync_group :][:1])
    )
    with pytest.raises(keras_dp.PrivacyError, match="Weight '.*/kernel' was made outside"):
        running.strategy(2).run(step, args=(shares, shares))


def test_compiling_outside_the_scope_is_no_fault():
    with running.strategy(2).scope():
        model, optimizer = _linear(), _sgd()
    model.compile(optimizer, loss=_product)
    model.fit(checks.LIN_X, checks.LIN_Y, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0].ravel(), -checks.LIN_STEP, atol=2e-6)


def test_apply_gradients_outside_a_replica():
    model = running.compiled(2, _sgd, _linear, loss=_product)
    with running.strategy(2).scope():
        clipped = keras_dp.clipped_gradients(
            model, checks.LIN_X, checks.LIN_Y, optimizer=model.optimizer
        )
        with pytest.raises(keras_dp.PrivacyError, match="outside a replica. Call keras_dp.clipped"):
            model.optimizer.apply_gradients(clipped)


def _product(y, prediction):
    return y * prediction
