"""The stand-in for TPUStrategy: what it sends, and that one replica of it trains as without it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from benchmarks.tpu import hlo, program
from benchmarks.tpu.strategy import ReplicatedStrategy


def lowered(function, *specs):
    """What TensorFlow hands to XLA, as instructions."""
    text = function.experimental_get_compiler_ir(*specs)(stage="hlo", platform_name="CPU")
    return hlo.instructions(text)


def program_of(strategy, replica_function):
    """The instructions of a program without arguments."""
    step = tf.function(lambda: strategy.run(replica_function), jit_compile=True, autograph=False)
    return lowered(step)


@pytest.mark.parametrize("name", program.PLAIN)
def test_only_the_gradients_are_sent(name):
    built = program.build("cnn", name, 8, private=True, batch_size=4)
    found = lowered(built.step, *built.specs)
    sent = hlo.collectives(found)
    assert {i.opcode for i in sent} == {"all-reduce"}
    assert sum(i.elements for i in sent) == built.parameters
    assert all("{{0,1,2,3,4,5,6,7}}" in i.rest for i in sent)
    assert hlo.generators(found) == ["philox"]
    assert hlo.host_calls(found) == []


def test_plain_keras_also_agrees_on_its_step_counter():
    """So a variable that a replica assigns by itself is seen."""
    built = program.build("cnn", "DPSGD", 8, private=False, batch_size=4)
    sent = hlo.collectives(lowered(built.step, *built.specs))
    assert sum(i.elements for i in sent) == built.parameters + 1


def test_without_noise_nothing_is_drawn():
    built = program.build("cnn", "DPSGD", 2, private=True, batch_size=4, noise=0.0)
    assert hlo.generators(lowered(built.step, *built.specs)) == []


@pytest.mark.parametrize(
    "aggregation, sends",
    [("NONE", False), ("SUM", True), ("MEAN", True), ("ONLY_FIRST_REPLICA", True)],
)
def test_an_assignment_by_a_replica_sends_what_its_aggregation_asks_for(aggregation, sends):
    strategy = ReplicatedStrategy(4)
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation[aggregation])
    variable.assign(2.0)  # outside of a program, nobody is there to agree with
    found = program_of(strategy, lambda: variable.assign_add(variable))
    assert bool(hlo.collectives(found)) is sends


def test_an_update_and_a_metric_send_nothing():
    strategy = ReplicatedStrategy(4)
    with strategy.scope():
        weight = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
        metric = keras.metrics.Mean()

    def replica():
        context = tf.distribute.get_replica_context()
        context.merge_call(lambda s: s.extended.update(weight, lambda v: v.assign(3.0)))
        metric.update_state(tf.constant([1.0, 2.0]))
        return metric.result()

    assert hlo.collectives(program_of(strategy, replica)) == []


def test_one_replica_trains_lin():
    """Of the design's LIN check: the weight moves by -(0.30, 0.65)."""
    strategy = ReplicatedStrategy(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=2)
        model.compile(optimizer, loss=lambda y, p: (y * p)[:, 0])
        optimizer.build(model.trainable_variables)
    x, y = np.float32([[3, 4], [0, 0.5]]), np.ones((2, 1), np.float32)
    specs = (tf.TensorSpec([2, 2]), tf.TensorSpec([2, 1]), tf.TensorSpec([2]))
    built = program.from_model(model, strategy, (x, y, np.ones(2, np.float32)), 2)
    built.step(*map(tf.constant, (x, y, np.ones(2, np.float32))))
    assert built.specs == specs
    np.testing.assert_allclose(model.get_weights()[0][:, 0], [-0.30, -0.65], rtol=1e-6)
