"""Is an update the same on one device and on several replicas?

    python -m benchmarks.equality [--page=docs/distribution.md]

Trains a small model on logical CPUs of this machine under `MirroredStrategy`, six updates on
batches of 16, 16 and 9 examples, with every optimizer and backend and so many replicas.

1. Without noise: how far the weights are from those of one device, relative to the largest of
   their entries.
2. With noise: whether all copies of all variables have the same bits.
3. NOISE: the standard deviation of an update of 1.2 million weights that the data do not move,
   relative to sigma C / batch_size.

Prints Markdown tables and writes them, and results.json, into --output_dir.
"""

import json
import pathlib

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import keras_dp
from benchmarks import page, tables
from keras_dp.distribution import get_strategy

FLAGS = flags.FLAGS

OPTIMIZERS = {
    "DPSGD": lambda **args: keras_dp.DPSGD(0.5, **args),
    "DPMomentum": lambda **args: keras_dp.DPMomentum(0.5, momentum=0.9, **args),
    "DPAdam": lambda **args: keras_dp.DPAdam(0.05, **args),
    "DPAdamW": lambda **args: keras_dp.DPAdamW(0.05, weight_decay=0.1, **args),
    "DPLamb": lambda **args: keras_dp.DPLamb(0.05, weight_decay=0.1, **args),
}
BACKENDS = ("layerwise", "vectorized", "loop")
BATCH_SIZE, LAST_BATCH = 16, 9


def _strategy(replicas):
    return get_strategy("mirrored", devices=replicas) if replicas else get_strategy()


def trained(replicas, optimizer, backend, noise_multiplier):
    """A model after six updates.

    Args:
      replicas: int; 0 for one device and no strategy.
      optimizer: name of one of OPTIMIZERS.
      backend, noise_multiplier: of the optimizer.
    """
    with _strategy(replicas).scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((12, 12, 3)),
                keras.layers.Conv2D(8, 3, 2, activation="gelu"),
                keras.layers.GroupNormalization(4),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        private = OPTIMIZERS[optimizer](
            l2_norm_clip=0.5,
            noise_multiplier=noise_multiplier,
            batch_size=BATCH_SIZE,
            backend=backend,
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(private, loss=loss)
    rng = np.random.default_rng(1)
    size = 2 * BATCH_SIZE + LAST_BATCH
    x, y = rng.normal(size=(size, 12, 12, 3)).astype("float32"), rng.integers(0, 10, size)
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    return model


def difference(model, other):
    """The largest difference of two models' weights, relative to the largest entry of each."""
    return max(
        float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
        for a, b in zip(model.get_weights(), other.get_weights())
    )


def copies_agree(model):
    """Whether the copies of each weight and of each variable of the optimizer have equal bits."""
    local = model.distribute_strategy.experimental_local_results
    copies = [local(v.value) for v in (*model.weights, *model.optimizer.variables)]
    return all(np.array_equal(a.numpy(), c[0].numpy()) for c in copies for a in c)


def equality(optimizers, backends, replicas):
    """A row for every optimizer and backend."""
    rows = []
    for optimizer in optimizers:
        for backend in backends:
            one = trained(0, optimizer, backend, 0.0)
            off = {n: difference(trained(n, optimizer, backend, 0.0), one) for n in replicas}
            bits = {n: copies_agree(trained(n, optimizer, backend, 1.0)) for n in replicas}
            rows.append(
                {"optimizer": optimizer, "backend": backend, "difference": off, "bits": bits}
            )
    return rows


def noise(replicas, sigma=3.0, clip=2.0):
    """A row for every number of replicas; 0 is one device."""
    rows = []
    for n in (0, *replicas):
        with _strategy(n).scope():
            kernels = [keras.layers.Dense(600, use_bias=False) for _ in range(2)]
            inputs = keras.Input((1000,))
            model = keras.Model(inputs, keras.layers.Add()([kernel(inputs) for kernel in kernels]))
            optimizer = keras_dp.DPSGD(
                1.0, l2_norm_clip=clip, noise_multiplier=sigma, batch_size=BATCH_SIZE
            )
            model.compile(optimizer, loss="mse")
        before = model.get_weights()
        zeros = np.zeros((LAST_BATCH, 1000), "float32"), np.zeros((LAST_BATCH, 600), "float32")
        model.fit(*zeros, batch_size=BATCH_SIZE, verbose=0)
        moved = np.concatenate([np.ravel(a - b) for a, b in zip(model.get_weights(), before)])
        ratio = float(np.std(moved) / (sigma * clip / BATCH_SIZE))
        rows.append({"replicas": n, "entries": moved.size, "std_ratio": ratio})
    return rows


def text(results):
    """The results as Markdown."""
    rows = results["equality"]
    replicas = list(rows[0]["difference"])
    header = ["optimizer", "backend", *(f"{n} replica{'s' * (n > 1)}" for n in replicas), "bits"]
    cells = [
        [
            row["optimizer"],
            row["backend"],
            *(f"{row['difference'][n]:.1e}" for n in replicas),
            "equal" if all(row["bits"].values()) else "DIFFERENT",
        ]
        for row in rows
    ]
    noises = [
        ["one device" if row["replicas"] == 0 else str(row["replicas"]), f"{row['std_ratio']:.4f}"]
        for row in results["noise"]
    ]
    return (
        f"{tables.markdown(header, cells)}\n"
        f"{tables.markdown(['replicas', 'std of the noise over sigma C / batch_size'], noises)}"
    )


def main(argv):
    """Measures everything."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    replicas = [int(n) for n in FLAGS.replicas]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * max(replicas),
    )
    results = {
        "equality": equality(FLAGS.optimizers, FLAGS.backends, replicas),
        "noise": noise(replicas),
    }
    output = pathlib.Path(FLAGS.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (output / "results.md").write_text(text(results))
    if FLAGS.page:
        page.replace_block(pathlib.Path(FLAGS.page), "equality", text(results))
    print(text(results))


if __name__ == "__main__":
    flags.DEFINE_list("replicas", ["1", "2", "4"], "numbers of replicas")
    flags.DEFINE_list("optimizers", list(OPTIMIZERS), "optimizers")
    flags.DEFINE_list("backends", list(BACKENDS), "backends")
    flags.DEFINE_string("output_dir", "output/equality", "where results are written")
    flags.DEFINE_string("page", None, "a Markdown page with a block for the tables")
    app.run(main)
