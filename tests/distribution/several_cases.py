"""Trains in many ways as one of several workers; ``test_multi_worker.py`` looks at the outcome."""

import contextlib
import io
import sys
import time

import keras
import tensorflow as tf

import keras_dp
from keras_dp import _keras
from keras_dp.distribution import cluster
from keras_dp.optimizers.base import private_optimizer
from tests.distribution.witness import LOSSES, Witness, examples, witnessed
from tests.distribution.worker import (
    digest,
    error_of,
    folder,
    number,
    report,
    strategy,
    weights_of,
)

DELTA = 1e-5


def compiled(n, batch_size, optimizer=keras_dp.DPSGD, noise=0.0, rate=0.5, seed=None, **options):
    """A witnessed model in the scope; Keras's own arguments of compile are told by name."""
    keras.utils.set_random_seed(100 + number)  # what differs must not matter
    for_compile = {
        k: options.pop(k) for k in ("jit_compile", "steps_per_execution") if k in options
    }
    with strategy.scope():
        model = witnessed(n)
        model.compile(
            optimizer(
                rate, l2_norm_clip=1.0, noise_multiplier=noise, batch_size=batch_size, **options
            ),
            LOSSES,
            **for_compile,
        )
    return model


def sampler_of(n, batch_size, **options):
    """Poisson draws of all examples; each worker has all of them."""
    return keras_dp.PoissonSampler(*examples(n), batch_size=batch_size, **options)


def trained(model, data, epochs=2, callbacks=(), **options):
    """What training shows, for the test to compare."""
    before, witness = weights_of(model), Witness()
    history = model.fit(
        data, epochs=epochs, verbose=0, callbacks=[*callbacks, witness], **options
    ).history
    return {
        "before": before,
        "after": weights_of(model),
        "state": digest(*weights_of(model), *(v.numpy() for v in model.optimizer.variables)),
        "present": witness.present,
        "updates": int(model.optimizer.iterations.numpy()),
        "history": history,
        "replicas": _copies_differ(model),
    }


def _copies_differ(model):
    """How many variables have copies that differ within this worker."""
    copies = [strategy.experimental_local_results(v.value) for v in model.trainable_variables]
    return sum(len({digest(c.numpy()) for c in each}) > 1 for each in copies)


# No momentum: who was in an update is read from what it moves.
WAYS = {
    "plain": ({}, {"seed": 5}),
    "pieces": ({}, {"physical_batch_size": 6}),
    "compiled": ({"jit_compile": True}, {}),
    "microbatches": ({"microbatch_size": 3}, {"capacity": 4}),  # nearly every draw is larger
    "adagrad": ({"optimizer": keras_dp.make_private(keras.optimizers.Adagrad)}, {}),
    "full": ({}, {"batch_size": 41, "steps_per_epoch": 2}),
}


def _without_noise(*ways):
    """Ways to train, without noise: each has to be that of one process on the same draws."""
    found = {}
    for way in ways:
        of_optimizer, of_sampler = WAYS[way]
        of_sampler = {"batch_size": 10} | of_sampler
        model = compiled(41, of_sampler["batch_size"], **of_optimizer)  # the last one has fewer
        found[way] = trained(model, sampler_of(41, **of_sampler))
    return found


def without_noise():
    """The way that differs most from the others' cases."""
    return _without_noise("pieces")


def more_without_noise():
    """The others."""
    return _without_noise("compiled", "plain", "microbatches", "adagrad", "full")


def many_draws():
    """Who was in each of many updates; often a worker has nobody in one."""
    model = compiled(20, 3)
    sampler = sampler_of(20, 3, seed=11, steps_per_epoch=200)
    return {"many draws": trained(model, sampler, epochs=1)}


def several_per_execution():
    """Two updates at a time, of an odd number: the last execution makes one."""
    model = compiled(41, 10, steps_per_execution=2)
    return {"two at a time": trained(model, sampler_of(41, 10))}


def accumulated():
    """Data that the user has shared out; two batches for an update."""
    x, y = examples(40)

    def own_part(context):
        data = tf.data.Dataset.from_tensor_slices((x, y))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(10 // strategy.num_replicas_in_sync)

    data = strategy.distribute_datasets_from_function(own_part)
    model = compiled(40, 20, gradient_accumulation_steps=2)
    logger = keras_dp.callbacks.EpsilonLogger(
        num_examples=40, sampling="shuffle", delta=DELTA, verbose=0
    )
    return {"accumulated": trained(model, data, callbacks=[logger], steps_per_epoch=4)}


def with_noise():
    """Noise, a ledger, files; whether the secret is in any of them."""
    ledger, printed = folder / f"disk{number}" / "ledger.json", io.StringIO()
    sampler = sampler_of(41, 10)
    model = compiled(41, 10, keras_dp.DPAdam, noise=1.0)
    logger = keras_dp.callbacks.EpsilonLogger(
        sampler, delta=DELTA, ledger=ledger, every_n_updates=2
    )
    files = [
        keras.callbacks.CSVLogger(folder / f"epochs{number}.csv"),
        keras.callbacks.ModelCheckpoint(
            folder / f"checkpoint{number}.weights.h5", save_weights_only=True
        ),
    ]
    with contextlib.redirect_stdout(printed):
        found = trained(model, sampler, callbacks=[logger, *files])
    optimizer, chief = private_optimizer(model), number == 0
    if chief:  # which no other worker has to join in
        model.save(folder / "chief.keras")
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(folder / f"tf{number}"))
    secret = optimizer._noise._secret.numpy()
    written = [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pickle"]
    marks = [
        secret.tobytes(),
        secret[:1].tobytes(),
        secret[1:].tobytes(),
        secret.tobytes().hex().encode(),
    ]
    marks += [str(int(half)).encode() for half in secret]
    return {
        "noise": found
        | {
            "secret": optimizer.noise_fingerprint,
            "run": optimizer.run_id,
            "written": len(written),
            "leaks": [p.name for p in written if any(m in p.read_bytes() for m in marks)],
            "ledger": ledger.exists(),
            "epsilon": logger.epsilon,
            "steps": logger.steps,
            "entries": len(logger.ledger.entries),
            "printed": printed.getvalue(),
        }
    }


def budget():
    """A budget of which the chief's ledger knows that some is spent; the others' disks do not."""
    path, sampler = folder / f"budget{number}" / "ledger.json", sampler_of(41, 10)
    if number == 0:
        ledger = keras_dp.PrivacyLedger(path, num_examples=41)
        ledger.record(
            keras_dp.accounting.Phase(
                num_examples=41, batch_size=10, noise_multiplier=1.0, sampling="poisson", steps=30
            )
        )
    model = compiled(41, 10, noise=1.0)
    limit = keras_dp.callbacks.PrivacyBudget(sampler, delta=DELTA, max_epsilon=12.0, ledger=path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = trained(model, sampler, epochs=1000, callbacks=[limit])
    again = error_of(lambda: model.fit(sampler, verbose=0, callbacks=[limit]))
    return {
        "budget": found
        | {
            "again": again,
            "epsilon": limit.epsilon,
            "steps": limit.steps,
            "left": error_of(limit.updates_left) or limit.updates_left(),
            "printed": printed.getvalue(),
            "files": [p.name for p in path.parent.glob("*")],
        }
    }


def broken_ledger():
    """What only the chief can find out, all are told."""
    path, sampler = folder / f"broken{number}" / "ledger.json", sampler_of(41, 10)
    ledger = keras_dp.PrivacyLedger(path, num_examples=41)
    if number == 0:
        path.parent.mkdir()
        path.write_text("{}")
    logger = keras_dp.callbacks.EpsilonLogger(sampler, delta=DELTA, ledger=ledger)
    model = compiled(41, 10, noise=1.0)
    return {"broken ledger": error_of(lambda: model.fit(sampler, verbose=0, callbacks=[logger]))}


def refused():
    """What has no meaning on several workers; and what they were told differently."""
    (x, one_hot), y = examples(40)
    arrays, sampler = ([x, one_hot], list(y)), sampler_of(40, 10)
    data = tf.data.Dataset.from_tensor_slices(((x, one_hot), y)).batch(10)
    logger = keras_dp.callbacks.EpsilonLogger
    drawn = strategy.distribute_datasets_from_function(lambda _: sampler.as_tf_dataset())
    by_word = logger(num_examples=40, sampling="poisson", delta=DELTA)
    model = compiled(40, 10, noise=1.0)
    other = compiled(40, 10 + number, noise=1.0)
    weights = digest(*weights_of(model))

    def fit(*data, model=model, **options):
        return error_of(lambda: model.fit(*data, verbose=0, **options))

    return {
        "refused": {
            "arrays": fit(*arrays, batch_size=10),
            "fixed": fit(keras_dp.FixedBatches(data.unbatch(), batch_size=10, num_examples=40)),
            "generator": fit(iter([((x[:10], one_hot[:10]), (y[0][:10], y[1][:10]))] * 4)),
            "tf.data": fit(data),
            "auto-sharded": fit(strategy.experimental_distribute_dataset(data)),
            "as_tf_dataset": fit(sampler.as_tf_dataset()),
            "drawn by each": fit(drawn, callbacks=[logger(sampler, delta=DELTA)]),
            "poisson by word": fit(drawn, callbacks=[by_word]),
            "train_on_batch": error_of(
                lambda: model.train_on_batch([x[:10], one_hot[:10]], [v[:10] for v in y])
            ),
            "epochs": fit(sampler, epochs=1 + number),
            "batch size": fit(sampler_of(40, 10 + number), model=other),
            "logger on the chief only": fit(
                sampler, callbacks=[] if number else [logger(sampler, delta=DELTA)]
            ),
            "delta": fit(sampler, callbacks=[logger(sampler, delta=DELTA * (1 + number))]),
        },
        "untouched": weights == digest(*weights_of(model)),
    }


class Stop(keras.callbacks.Callback):
    """Ends training after two epochs."""

    def on_epoch_end(self, epoch, logs=None):
        """Of this worker; the others have to follow."""
        self.model.stop_training = epoch == 1


def state_of_the_chief():
    """Workers whose weights differ, of which only the chief has a backup to go on from."""
    backup, sampler = folder / "backup", sampler_of(41, 10)
    saving = [keras.callbacks.BackupAndRestore(backup, delete_checkpoint=False)]
    of_chief, of_other = ([], [Stop()]) if number else (saving, [])
    model = compiled(41, 10, keras_dp.DPAdam, noise=1.0)
    first = trained(model, sampler, epochs=9, callbacks=of_chief + of_other)
    again = compiled(41, 10, keras_dp.DPAdam, noise=1.0)
    again.set_weights([w + number for w in again.get_weights()])
    run = private_optimizer(again).run_id
    second = trained(again, sampler, epochs=3, callbacks=of_chief)
    second["run"] = run, private_optimizer(again).run_id
    return {"stopped": first, "resumed": second}


def said_by_the_chief():
    """The channel itself."""

    class Wrong(Exception):
        pass

    def fail():
        raise Wrong("no room")

    values = [None, 0.1, [1, "é"], "x" * 100_001]
    return {
        "heard": [cluster.from_chief(strategy, lambda v=v: v) for v in values]
        + [cluster.from_chief(strategy, lambda: number)],
        "failed": error_of(lambda: cluster.from_chief(strategy, fail)),
        "bytes": cluster.bytes_from_chief(strategy, bytes(range(256)) * (1 + number)),
        "total": cluster.total(strategy, [1, number]).tolist(),
    }


def plain_keras():
    """Whether Keras by itself can do now what ``distribution/trainer.py`` does for it."""
    reduce, build = (
        _keras.trainer.reduce_per_replica,
        _keras.TensorFlowTrainer._maybe_symbolic_build,
    )
    found = {}
    for what, holder, patched in (
        ("reduce_per_replica", _keras.trainer, reduce),
        ("_maybe_symbolic_build", _keras.TensorFlowTrainer, build),
    ):
        model = compiled(41, 10)
        setattr(holder, what, patched.__wrapped__)
        try:
            found[what] = error_of(lambda m=model: m.fit(sampler_of(41, 10), verbose=0))
        finally:
            setattr(holder, what, patched)
    return {"plain Keras": found}


CASES = {
    case.__name__: case
    for case in (
        said_by_the_chief,
        without_noise,
        more_without_noise,
        many_draws,
        several_per_execution,
        accumulated,
        with_noise,
        budget,
        broken_ledger,
        refused,
        state_of_the_chief,
        plain_keras,
    )
}

if __name__ == "__main__":
    findings = {}
    for name in sys.argv[2:]:
        begin = time.monotonic()
        findings |= CASES[name]()
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    report(findings)
