"""Every way into a step under a mirrored strategy, and what Keras does around it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from tests.distribution import running
from tests.fixtures import checks, zoo

PRIVACY = dict(l2_norm_clip=0.5, noise_multiplier=0.0, batch_size=8)


def _sgd(**kwargs):
    return keras_dp.DPSGD(0.5, **PRIVACY | kwargs)


def _adam(**kwargs):
    return keras_dp.DPAdam(0.05, **PRIVACY | kwargs)


@pytest.mark.parametrize(
    "replicas, compile_args",
    [(2, {}), (1, {}), (2, {"run_eagerly": True}), (2, {"steps_per_execution": 3})],
)
def test_train_on_batch_shares_the_batch_out(replicas, compile_args):
    """LIN: Keras gives every replica all of it, and an example would count several times."""
    with running.strategy(replicas).scope():
        optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0, batch_size=2)
        checks.check_lin(optimizer, checks.train_on_batch, **compile_args)


def test_train_on_batch():
    """Batches of 8, 3 and 1 examples, weights, padding and class weights."""
    models = [running.compiled(n, _adam, weighted_metrics=["accuracy"]) for n in (2, 0)]
    for model in models:
        x, y = zoo.batch(model, size=8)
        weight = np.array([1, 2, 0, -0.0, 1, 1, -0.0, -0.0], "float32")
        logs = [
            model.train_on_batch(x, y),
            model.train_on_batch(x[:3], y[:3]),
            model.train_on_batch(x[:1], y[:1]),
            model.train_on_batch(x, y, sample_weight=weight),
            model.train_on_batch(x, y, class_weight={0: 2.0, 1: 0.5, 2: 1.0}),
        ]
        assert np.all(np.isfinite(logs))
    running.assert_same(*models)
    running.assert_copies_agree(models[0])


def test_test_on_batch():
    models = [running.compiled(n, _sgd, metrics=["accuracy"]) for n in (2, 0)]
    x, y = zoo.batch(models[0], size=8)
    np.testing.assert_allclose(*(m.test_on_batch(x, y) for m in models), rtol=1e-5)


def test_evaluate_predict_and_logs():
    """Numbers of uneven batches equal those of one device; padding and empty shares included."""
    models = [running.compiled(n, _sgd, metrics=["accuracy"]) for n in (2, 0)]
    logs, scores, outputs = [], [], []
    for model in models:
        x, y = zoo.batch(model, size=17)
        history = running.fit_unevenly(model, validation_data=(x[:9], y[:9])).history
        logs.append([history[key] for key in sorted(history)])
        scores.append(model.evaluate(x, y, batch_size=8, verbose=0))
        outputs.append(model.predict(x, batch_size=8, verbose=0))
    np.testing.assert_allclose(*logs, rtol=1e-5)
    np.testing.assert_allclose(*scores, rtol=1e-5)
    np.testing.assert_allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_evaluate_and_predict_as_they_are_compiled(jit_compile):
    """Whatever ``fit`` makes of these arguments, the other two have to work with them too."""
    models = [
        running.compiled(2, _sgd, jit_compile=jit_compile, steps_per_execution=2),
        running.compiled(0, _sgd),
    ]
    x, y = zoo.batch(models[0], size=17)
    np.testing.assert_allclose(
        *(m.evaluate(x, y, batch_size=8, verbose=0) for m in models), rtol=1e-5
    )
    np.testing.assert_allclose(*(m.predict(x, batch_size=8, verbose=0) for m in models), atol=1e-5)
    assert models[0].steps_per_execution == 2 and models[0].jit_compile == jit_compile


def test_custom_loop():
    """The optimizer is built by the first step, inside ``strategy.run``."""
    models = [running.compiled(n, _adam) for n in (2, 0)]
    x, y = zoo.batch(models[0], size=17)
    assert running.steps(models[0], x, y, times=2) == 34
    running.fit_unevenly(models[1])
    running.assert_same(*models)
    running.assert_copies_agree(models[0])


def test_a_custom_loop_without_tf_function():
    models = [running.compiled(n, _adam) for n in (2, 0)]
    x, y = zoo.batch(models[0], size=16)
    strategy = models[0].distribute_strategy

    def step(x, y):
        clipped = keras_dp.clipped_gradients(models[0], x, y, optimizer=models[0].optimizer)
        models[0].optimizer.apply_gradients(clipped)

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(step, batch)
    running.fit_unevenly(models[1], size=16, epochs=1)
    running.assert_same(*models)


@pytest.mark.parametrize("steps_per_execution", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_privacy_is_accounted_as_on_one_device(tmp_path, steps_per_execution):
    spent = []
    for replicas in (2, 0):
        model = running.compiled(
            replicas,
            lambda: _sgd(noise_multiplier=2.0),
            steps_per_execution=steps_per_execution,
        )
        x, y = zoo.batch(model, size=40)
        sampler = keras_dp.PoissonSampler(x, y, batch_size=8)
        path = tmp_path / f"{replicas}.json"
        logger = keras_dp.callbacks.EpsilonLogger(sampler, delta=1e-3, ledger=path, verbose=0)
        budget = keras_dp.callbacks.PrivacyBudget(sampler, delta=1e-3, max_epsilon=3.0)
        history = model.fit(sampler, epochs=50, verbose=0, callbacks=[logger, budget]).history
        updates = int(model.optimizer.iterations.numpy())
        assert updates == model.optimizer.released < 250
        spent.append((history["epsilon"], updates, logger.ledger.epsilon(1e-3)))
    assert spent[0] == spent[1]
    assert spent[0][0][-1] <= 3.0


def _other_weights(model):
    model.set_weights([w + 1 for w in model.get_weights()])


@pytest.mark.parametrize("before, after", [(2, 0), pytest.param(0, 2, marks=pytest.mark.slow)])
def test_saving(tmp_path, before, after):
    """A model and its weights go on, with the optimizer's state, between strategy and none."""
    first = running.compiled(before, _adam)
    running.fit_unevenly(first)
    first.save(tmp_path / "model.keras")
    first.save_weights(tmp_path / "model.weights.h5")
    with running.strategy(after).scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    weights_only = running.compiled(after, _adam)
    _other_weights(weights_only)
    weights_only.load_weights(tmp_path / "model.weights.h5")
    for model in (loaded, weights_only):
        for a, b in zip(model.get_weights(), first.get_weights()):
            np.testing.assert_array_equal(a, b)
    running.assert_same(loaded, first)
    assert loaded.optimizer.run_id == first.optimizer.run_id
    for model in (loaded, first):
        running.fit_unevenly(model, epochs=1)
    running.assert_same(loaded, first)


@pytest.mark.parametrize("before, after", [(2, 0), pytest.param(0, 2, marks=pytest.mark.slow)])
def test_checkpoints(tmp_path, before, after):
    """``tf.train.Checkpoint`` restores state and run; half a logical batch begins anew."""
    make = lambda: _adam(gradient_accumulation_steps=2)  # noqa: E731
    first, second = running.compiled(before, make), running.compiled(after, make)
    running.fit_unevenly(first, epochs=1)  # three batches: one update, one batch that waits
    assert first.optimizer.parts_waiting == 1
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(tmp_path / "at")
    with running.strategy(after).scope():
        second.optimizer.build(second.trainable_variables)
    tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path)
    running.assert_same(second, first)
    assert second.optimizer.run_id == first.optimizer.run_id
    assert second.optimizer.parts_waiting == 0
    for model in (first, second):
        running.fit_unevenly(model)
    running.assert_same(second, first)
    for model in (first, second):
        if model.distribute_strategy.num_replicas_in_sync > 1:
            running.assert_copies_agree(model)


def test_plain_optimizers_are_left_to_keras():
    """Their train_on_batch, as Keras has it, gives each replica the batch, and the mean."""
    with running.strategy(2).scope():
        model = zoo.build("dense")
        model.compile(keras.optimizers.SGD(0.1), loss=running.CROSSENTROPY)
    one = zoo.build("dense")
    one.compile(keras.optimizers.SGD(0.1), loss=running.CROSSENTROPY)
    x, y = zoo.batch(model, size=8)
    for m in (model, one):
        m.train_on_batch(x, y)
        m.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    for a, b in zip(model.get_weights(), one.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)
