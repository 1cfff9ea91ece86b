"""What callbacks are told of the data against what `fit` gets: what cannot be is refused."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.callbacks import EpsilonLogger
from keras_dp.errors import PrivacyError
from tests.callbacks.runs import (
    BATCH,
    DELTA,
    N,
    X,
    Y,
    compiled,
    poisson,
    sampler,
    sgd,
    shuffle_logger,
    shuffled,
)


def refused(match, logger, *args, model=None, **kwargs):
    """`fit` raises before the first update."""
    model = compiled() if model is None else model
    made = int(model.optimizer.iterations)
    with pytest.raises(PrivacyError, match=match):
        model.fit(*args, callbacks=[logger], verbose=0, **kwargs)
    assert int(model.optimizer.iterations) == made and logger.steps == made


def poisson_logger(batches, **kwargs):
    return EpsilonLogger(batches, delta=DELTA, verbose=0, **kwargs)


class Wrapped(keras.utils.PyDataset):
    """Batches of a sampler, changed on the way."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        x, y, sample_weight = self.batches[index]
        return x + 1, y, sample_weight


class Repeats(Wrapped):
    """Hands out the first draw again and again."""

    def __getitem__(self, index):
        self.first = getattr(self, "first", None) or self.batches[0]
        return self.first


def test_sampler_with_another_batch_size():
    batches = sampler(batch_size=16)
    refused(r"draws 16 examples .* batch_size is 8", poisson_logger(batches), batches)


def test_arrays_in_place_of_the_sampler():
    logger = poisson_logger(sampler())
    refused(r"ndarray of 40 examples, not on the sampler", logger, X, Y, batch_size=BATCH)


def test_arrays_in_place_of_the_sampler_after_an_honest_fit():
    batches, model = sampler(), compiled()
    logger = poisson_logger(batches)
    model.fit(batches, epochs=4, callbacks=[logger], verbose=0)
    refused("not on the sampler", logger, X, Y, batch_size=BATCH, model=model)


def test_another_sampler():
    refused("another sampler, a PoissonSampler", poisson_logger(sampler()), sampler())


def test_batches_of_the_sampler_changed_on_the_way():
    batches = sampler()
    logger = poisson_logger(batches)
    history = compiled().fit(Wrapped(batches), epochs=2, callbacks=[logger], verbose=0).history
    assert history["epsilon"] == pytest.approx([poisson(5), poisson(10)], rel=1e-9)


def test_one_draw_used_for_several_updates():
    batches = sampler()
    logger = poisson_logger(batches)
    with pytest.raises(PrivacyError, match="made 5 updates, but the sampler handed out 0 batches"):
        compiled().fit(Repeats(batches), callbacks=[logger], verbose=0)


def test_validation_draws_do_not_pass_for_training_draws():
    batches = sampler()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    refused("validates on the sampler", poisson_logger(batches), data, validation_data=batches)
    logger = poisson_logger(batches)  # harmless when the training batches are known
    compiled().fit(batches, validation_data=batches, callbacks=[logger], verbose=0)
    assert logger.steps == 5


def test_draws_of_other_processes():
    batches = types.SimpleNamespace(
        num_examples=N,
        batch_size=BATCH,
        sampling="poisson",
        batches_drawn=0,
        use_multiprocessing=True,
    )
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    refused("cannot be told when they are drawn in other", poisson_logger(batches), data)


@pytest.mark.slow
def test_a_sampler_with_worker_processes_is_known_by_itself():
    batches = sampler(workers=2, use_multiprocessing=True)
    logger = poisson_logger(batches)
    compiled().fit(batches, epochs=2, callbacks=[logger], verbose=0)
    assert logger.steps == 10


def test_poisson_draws_are_not_accumulated():
    """The union of several draws is no Poisson draw of their expected total."""
    optimizer = keras_dp.DPSGD(
        0.1,
        l2_norm_clip=1.0,
        noise_multiplier=2.0,
        batch_size=BATCH,
        gradient_accumulation_steps=2,
    )
    batches = sampler()
    refused("draw of its own", poisson_logger(batches), batches, model=compiled(optimizer))


def told_poisson(**kwargs):
    return EpsilonLogger(num_examples=N, sampling="poisson", delta=DELTA, verbose=0, **kwargs)


def accumulating(batch_size):
    return keras_dp.DPSGD(
        0.1,
        l2_norm_clip=1.0,
        noise_multiplier=2.0,
        batch_size=batch_size,
        gradient_accumulation_steps=2,
    )


def test_a_sampler_that_is_told_by_number_and_word():
    """Its draws count, not the optimizer's batch_size."""
    refused("draws 16 examples .* batch_size is 8", told_poisson(), sampler(16))
    model = compiled(accumulating(2 * BATCH))
    refused("draw of its own", told_poisson(), sampler(), model=model)


def test_draws_of_a_generator_are_not_accumulated():
    model = compiled(accumulating(2 * BATCH))
    refused("draw of its own", told_poisson(), (b for b in sampler()), model=model)


class Loops(keras.Model):
    """Makes several updates on each batch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        for _ in range(5):
            clipped = keras_dp.clipped_gradients(self, *data, optimizer=self.optimizer)
            self.optimizer.apply_gradients(clipped)
        return {"loss": clipped.loss}


@pytest.mark.parametrize("told", [poisson_logger, lambda batches: told_poisson()])
@pytest.mark.parametrize("steps", [2, 20])
def test_a_train_step_that_uses_a_draw_five_times(told, steps):
    batches, model = sampler(steps_per_epoch=steps), Loops()
    model.compile(sgd(), loss="mse")
    with pytest.raises(PrivacyError, match=f"made {5 * steps} updates"):
        model.fit(batches, callbacks=[told(batches)], verbose=0)


@pytest.mark.parametrize("kwargs", [{}, {"physical_batch_size": 4}])
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_honest_draws_are_as_many_as_updates(kwargs, steps_per_execution):
    batches, model = sampler(**kwargs), compiled(steps_per_execution=steps_per_execution)
    logger = poisson_logger(batches)
    for _ in range(3):
        model.fit(batches, epochs=2, callbacks=[logger], verbose=0)
    assert logger.steps == 30


def users_of_four():
    return sampler(5, users=np.arange(N) // 4, examples_per_user=4)


def grouping(**kwargs):
    return keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=2.0, batch_size=5, **kwargs)


def test_users_that_the_optimizer_does_not_group():
    batches = users_of_four()
    model = compiled(grouping())
    refused(
        "examples_per_user=4, the optimizer None", poisson_logger(batches), batches, model=model
    )


def test_users_are_grouped_whether_or_not_anybody_accounts():
    """Without the optimizer's part, one user could move an update by four times the clip."""
    model = compiled(grouping())
    before = [w.numpy() for w in model.weights]
    with pytest.raises(PrivacyError, match="examples_per_user=4, the optimizer None"):
        model.fit(users_of_four(), verbose=0)
    np.testing.assert_equal([w.numpy() for w in model.weights], before)
    with pytest.raises(PrivacyError, match="examples_per_user=None, the optimizer 2"):
        compiled(grouping(examples_per_user=2)).fit(sampler(5), verbose=0)


def test_users_are_accounted_as_users():
    batches = users_of_four()
    logger = EpsilonLogger(batches, delta=DELTA)
    found = compiled(grouping(examples_per_user=4)).fit(
        batches, epochs=2, callbacks=[logger], verbose=0
    )
    want = keras_dp.compute_epsilon(
        num_examples=10, batch_size=5, noise_multiplier=2.0, delta=DELTA, steps=4
    )
    assert found.history["epsilon"][-1] == pytest.approx(want)


def test_draws_in_pieces_are_counted_once():
    batches = sampler(physical_batch_size=3)
    logger = poisson_logger(batches)
    found = compiled().fit(batches, epochs=2, callbacks=[logger], verbose=0)
    assert logger.steps == 10
    assert found.history["epsilon"][-1] == pytest.approx(poisson(10))


def test_arrays_said_to_be_poisson():
    logger = EpsilonLogger(num_examples=N, sampling="poisson", delta=DELTA)
    refused(r"PoissonSampler\(x, y, batch_size=8\)", logger, X, Y, batch_size=BATCH)


def test_another_number_of_examples():
    logger = shuffle_logger(num_examples=10 * N)
    refused(r"trains on 40 examples, .* 400\. Pass num_examples=40", logger, X, Y, batch_size=BATCH)


@pytest.mark.parametrize("data", [{"a": X, "b": X[:, :1]}, [X, X], tf.constant(X)], ids=type)
def test_another_number_of_examples_in_any_structure(data):
    logger = shuffle_logger(num_examples=N + 1)
    refused("trains on 40 examples", logger, data, Y, batch_size=BATCH)


def test_validation_split():
    match = r"36 examples \(40 without validation_split=0.1 of them\), .*Pass num_examples=36"
    refused(match, shuffle_logger(), X, Y, batch_size=BATCH, validation_split=0.1)
    logger = shuffle_logger(num_examples=36)
    compiled().fit(X, Y, batch_size=BATCH, validation_split=0.1, callbacks=[logger], verbose=0)
    assert logger.steps == 5


@pytest.mark.parametrize("split", [0.03, 0.1, 0.25, 0.3, 0.97])
def test_validation_split_leaves_what_keras_leaves(split):
    batch, left = 1, []

    class Counts(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            left.append(self.params["steps"])
            self.model.stop_training = True

    compiled(sgd(batch_size=batch)).fit(
        X, Y, batch_size=batch, validation_split=split, callbacks=[Counts()], verbose=0, epochs=0
    )
    with pytest.raises(PrivacyError, match=f"Pass num_examples={left[0]}\\."):
        compiled(sgd(batch_size=batch)).fit(
            X,
            Y,
            batch_size=batch,
            validation_split=split,
            callbacks=[shuffle_logger(num_examples=10**6)],
            verbose=0,
        )


def test_another_batch_size():
    refused(r"batch_size is 16, but .* 8.* fit batch_size=8", shuffle_logger(), X, Y, batch_size=16)
    refused(r"fit got no batch_size and takes 32", shuffle_logger(), X, Y)
    # the whole data set in one batch
    logger = shuffle_logger()
    compiled(sgd(batch_size=N)).fit(X, Y, batch_size=64, callbacks=[logger], verbose=0)
    assert logger.steps == 1


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_more_batches_than_the_examples_make(drop_remainder):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder)
    match = "5 batches in an epoch, but 32 examples make no more than 4 of 8"
    refused(match, shuffle_logger(num_examples=32), data)
    refused(match, shuffle_logger(num_examples=32), Wrapped(sampler_like(data)))


def sampler_like(data):
    return [(*batch, None) for batch in data]


def test_static_batches_of_another_size():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=True)
    refused("batches of 4 examples", shuffle_logger(), data.repeat(), steps_per_epoch=3)


@pytest.mark.parametrize("validated", [False, True])
def test_passes_over_more_examples_than_there_are(validated):
    """Batches of 16 said to be of 8: five of them are two passes, not one."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(2 * BATCH)
    more = {"validation_data": (X[:3], Y[:3])} if validated else {}
    with pytest.raises(PrivacyError, match="on 80 examples in 5 updates, .* 1 passes over 40"):
        compiled().fit(data, steps_per_epoch=5, callbacks=[shuffle_logger()], verbose=0, **more)
    data, logger = data.unbatch().batch(BATCH), shuffle_logger()
    compiled().fit(data, steps_per_epoch=11, epochs=2, callbacks=[logger], verbose=0, **more)
    assert logger.epsilon == pytest.approx(shuffled(6), rel=1e-9)


def test_a_sampler_that_is_said_to_be_something_else():
    batches = sampler()
    refused("sampling='poisson'.*with sampling='shuffle'", shuffle_logger(), batches)
    logger = EpsilonLogger(num_examples=2 * N, sampling="poisson", delta=DELTA)
    refused("PoissonSampler of 40 units", logger, batches)
    logger = EpsilonLogger(num_examples=N, sampling="poisson", delta=DELTA, verbose=0)
    compiled().fit(batches, callbacks=[logger], verbose=0)
    assert logger.epsilon == pytest.approx(poisson(5), rel=1e-9)


def test_generators_are_taken_on_trust():
    def batches():
        while True:
            yield X[:BATCH], Y[:BATCH]

    logger = shuffle_logger()
    compiled().fit(batches(), steps_per_epoch=5, epochs=2, callbacks=[logger], verbose=0)
    assert logger.epsilon == pytest.approx(shuffled(2), rel=1e-9)


def test_a_model_that_changes_the_data_on_the_way_to_fit():
    """What counts is what Keras's own fit gets."""

    class Half(keras.Sequential):
        def fit(self, x, y, **kwargs):
            return super().fit(x[: N // 2], y[: N // 2], **kwargs)

    model = Half([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(sgd(), loss="mse")
    refused("trains on 20 examples", shuffle_logger(), X, Y, batch_size=BATCH, model=model)


def test_keyword_and_positional_arguments():
    refused("trains on 40", shuffle_logger(num_examples=41), x=X, y=Y, batch_size=BATCH)
    model = compiled()
    with pytest.raises(PrivacyError, match="trains on 40"):
        model.fit(X, Y, BATCH, 1, 0, [shuffle_logger(num_examples=41)])
    with pytest.raises(TypeError, match="no_such"):
        model.fit(X, Y, no_such=1)


def test_samplers_of_other_makes_need_the_attributes():
    with pytest.raises(ValueError, match="received SimpleNamespace, without batch_size"):
        EpsilonLogger(types.SimpleNamespace(num_examples=3), delta=DELTA)
    assert isinstance(sampler(), keras_dp.PoissonSampler)
