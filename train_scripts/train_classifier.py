"""Trains a model of models/ on a data set of images, privately, and tells what it cost.

    python train_scripts/train_classifier.py --dataset=fashion_mnist_debian --model=cnn \
        --activation=tanh --batch_size=2048 --epochs=40 --target_epsilon=3
    python train_scripts/train_classifier.py --dataset=fashion_mnist_debian \
        --features=scattering --model=normalized_linear --batch_size=8192 --epochs=80 \
        --l2_norm_clip=0.2 --learning_rate=32 --target_epsilon=3 --seeds=0,1,2
    python train_scripts/train_classifier.py ... --disable_dp      # the same without privacy

Every seed is a run of its own: it sets the weights and the order without privacy, never the noise
or the draws. results.json in --output_dir has them all: accuracy of each, mean and spread, epsilon,
delta and time. A run with --disable_dp writes beside the private ones in the same file.

The test accuracy is that of the last update. Epsilon is that of one run: whoever trains three times
on private data and publishes all has spent three times, which results.json tells as well.
"""

import json
import os
import pathlib
import re
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for models, train_scripts

import keras
import numpy as np
from absl import flags

import keras_dp
import models
from keras_dp import accounting
from train_scripts import commands, datasets, schedules
from train_scripts.errors import DataNotFoundError

PRIVATE = {
    "sgd": keras_dp.DPSGD,
    "momentum": keras_dp.DPMomentum,
    "adam": keras_dp.DPAdam,
    "adamw": keras_dp.DPAdamW,
    "lamb": keras_dp.DPLamb,
}
PLAIN = {
    "sgd": keras.optimizers.SGD,
    "momentum": keras.optimizers.SGD,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "lamb": keras.optimizers.Lamb,
}

# Models without a choice of normalisation or activation, by name.
SIMPLE = {
    "mlp": models.mlp,
    "linear": models.linear_head,
    "normalized_linear": models.normalized_linear,
    "transfer_cnn": models.transfer_cnn,
}
# Models that take an activation.
ACTIVATED = {
    "cnn": models.cnn,
    "deep_cnn": models.deep_cnn,
    "scattering_cnn": models.scattering_cnn,
}


def define_flags():
    """The flags of this program."""
    values = flags.FlagValues()

    def text(name, default, told):
        flags.DEFINE_string(name, default, told, flag_values=values)

    def integer(name, default, told, least=None):
        flags.DEFINE_integer(name, default, told, least, flag_values=values)

    def real(name, default, told, least=None):
        flags.DEFINE_float(name, default, told, least, flag_values=values)

    def choice(name, default, allowed, told):
        flags.DEFINE_enum(name, default, allowed, told, flag_values=values)

    def boolean(name, told):
        flags.DEFINE_boolean(name, False, told, flag_values=values)

    text("dataset", "fashion_mnist_debian", "A name of train_scripts/datasets.py.")
    integer("image_size", None, "Side to resize images to; for folder: and tfds:.", 1)
    choice("features", "none", ("none", "scattering"), "What is computed of images beforehand.")
    text("model", "cnn", "See build_model: cnn, deep_cnn, resnet18, wrn16_4, vit_ti16, ...")
    text("activation", "tanh", "Of cnn, deep_cnn, scattering_cnn: tanh, relu, tempered_sigmoid.")
    choice("norm", "group", ("group", "layer"), "Normalisation of ResNets.")
    integer("groups", 16, "Groups of the group normalisation.", 1)
    boolean("weight_standardization", "Standardise the kernels of ResNets.")
    choice("optimizer", "momentum", sorted(PRIVATE), "Optimizer.")
    real("learning_rate", 1.0, "Largest learning rate.", 0)
    choice("lr_schedule", "fixed", schedules.SCHEDULES, "Course of the learning rate.")
    real("warmup_epochs", 0.0, "Epochs in which it rises.", 0)
    real("ema", None, "Momentum of an average over updates, which is evaluated and saved.", 0)
    integer("epochs", 10, "Epochs of ceil(examples / batch_size) updates.", 1)
    integer("batch_size", 1024, "Expected examples in an update.", 1)
    integer("physical_batch_size", None, "Examples at a time; the whole update if not given.", 1)
    real("l2_norm_clip", 1.0, "Bound on the norm of each example's gradient.", 0)
    choice("clipping", "flat", ("flat", "automatic"), "How gradients are clipped.")
    real("target_epsilon", None, "Epsilon of a run. Or:", 0)
    real("noise_multiplier", None, "Standard deviation of the noise over the clipping norm.", 0)
    real("delta", 1e-5, "Delta of the guarantee.", 0)
    boolean("disable_dp", "Train without privacy.")
    integer("augmentations", None, "Copies of each example, whose gradients are averaged.", 1)
    integer("shift", 0, "Pixels by which training images are moved at most.", 0)
    boolean("flip", "Mirror training images at random.")
    flags.DEFINE_list("seeds", ["0"], "Of the weights, a run for each.", flag_values=values)
    text("output_dir", "output/classifier", "Where results.json and models are written.")
    choice("verbose", "1", ("0", "1", "2"), "0: silence, 1: a line an epoch, 2: progress bars.")
    return values


def build_model(values, input_shape, num_classes):
    """The network that --model names, for inputs of one shape.

    Names: cnn, deep_cnn, scattering_cnn (with --activation), mlp, linear, normalized_linear,
    transfer_cnn, resnet18, resnet34, resnet50, resnet18v2 and so on, wrn16_4 (any depth and width),
    vit_ti16 (ti, s, b, l, h and the patch's side).

    Raises:
      ValueError: for another name, or inputs that it cannot take.
    """
    name = values.model
    if name in SIMPLE:
        return SIMPLE[name](input_shape, num_classes)
    if name in ACTIVATED:
        return ACTIVATED[name](input_shape, num_classes, activation=values.activation)
    norm = {
        "norm": values.norm,
        "groups": values.groups,
        "weight_standardization": values.weight_standardization,
    }
    if match := re.fullmatch(r"resnet(18|34|50|101)(v2)?", name):
        stem = "large" if input_shape[0] > 64 else "small"
        version = 2 if match[2] else 1
        return models.resnet(input_shape, num_classes, int(match[1]), stem, version, **norm)
    if match := re.fullmatch(r"wrn(\d+)_(\d+)", name):
        return models.wide_resnet(input_shape, num_classes, int(match[1]), int(match[2]), **norm)
    if match := re.fullmatch(r"vit_(ti|s|b|l|h)(\d+)", name):
        dim, depth, heads = models.VIT_SIZES[match[1].capitalize()]
        return models.vit(input_shape, num_classes, int(match[2]), dim, depth, heads, name=name)
    raise ValueError(
        f"--model takes {', '.join([*ACTIVATED, *SIMPLE])}, resnet18, resnet34, resnet50, "
        "resnet101 (each with v2), wrn16_4 (depth_width) or vit_ti16 (size and patch); received "
        f"{name!r}."
    )


def augmented(model, values):
    """The model behind layers that move and mirror images at random while it is trained.

    Raises:
      ValueError: --augmentations without anything that is random.
    """
    layers, shape = [], model.input_shape[1:]
    if values.shift:
        share = [values.shift / side for side in shape[:2]]
        layers.append(keras.layers.RandomTranslation(*share, "constant", "nearest", name="move"))
    if values.flip:
        layers.append(keras.layers.RandomFlip("horizontal", name="mirror"))
    if values.augmentations and not layers:
        raise ValueError(
            f"--augmentations={values.augmentations} takes as many copies of each image, all the "
            "same ones: give --shift or --flip too."
        )
    if layers and len(shape) != 3 or layers and values.features != "none":
        raise ValueError(f"--shift and --flip need images; the model takes {shape}.")
    if not layers:
        return model
    inputs = x = keras.Input(shape)
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, model(x), name=model.name)


def noise_multiplier(values, examples):
    """The noise of a run, from --noise_multiplier or --target_epsilon; None without privacy."""
    if values.disable_dp:
        return None
    if (values.noise_multiplier is None) == (values.target_epsilon is None):
        raise ValueError(
            "Give one of --target_epsilon and --noise_multiplier, or --disable_dp. Received: "
            f"--target_epsilon={values.target_epsilon} "
            f"--noise_multiplier={values.noise_multiplier}."
        )
    if values.noise_multiplier is not None:
        return values.noise_multiplier
    return keras_dp.compute_noise_multiplier(
        target_epsilon=values.target_epsilon,
        num_examples=examples,
        batch_size=values.batch_size,
        delta=values.delta,
        epochs=values.epochs,
    )


def make_optimizer(values, updates_per_epoch, noise):
    """The optimizer of --optimizer, with its schedule, private if there is a noise multiplier."""
    updates = values.epochs * updates_per_epoch
    rate = schedules.WarmUp(
        values.learning_rate,
        updates,
        min(round(values.warmup_epochs * updates_per_epoch), updates),
        values.lr_schedule,
    )
    arguments = {"momentum": 0.9} if values.optimizer == "momentum" else {}
    if values.ema is not None:
        arguments |= {"use_ema": True, "ema_momentum": values.ema}
    if noise is None:
        return PLAIN[values.optimizer](rate, **arguments)
    return PRIVATE[values.optimizer](
        rate,
        l2_norm_clip=values.l2_norm_clip,
        noise_multiplier=noise,
        batch_size=values.batch_size,
        clipping=values.clipping,
        augmentations=values.augmentations,
        **arguments,
    )


class Lines(keras.callbacks.Callback):
    """Prints a line an epoch and keeps what it says."""

    def __init__(self, printed):
        super().__init__()
        self._printed, self.epochs = printed, []

    def on_epoch_end(self, epoch, logs=None):
        """Accuracy and epsilon of the epoch; the training loss in the logs is not private."""
        record = {"epoch": epoch + 1, "test_accuracy": float(logs["val_accuracy"])}
        if "epsilon" in logs:
            record["epsilon"] = float(logs["epsilon"])
        self.epochs.append(record)
        if self._printed:
            spent = f", epsilon {record['epsilon']:.3f}" if "epsilon" in record else ""
            print(
                f"epoch {record['epoch']}: test accuracy {record['test_accuracy']:.4f}{spent}",
                flush=True,
            )


def run(values, images, noise, seed):
    """One training.

    Args:
      values: parsed flags.
      images: ``data.ImageData``.
      noise: noise multiplier, or None without privacy.
      seed: of weights and order.

    Returns:
      The model and a dict for results.json.
    """
    begun = time.monotonic()
    keras.utils.set_random_seed(seed)
    model = augmented(build_model(values, images.x_train.shape[1:], images.num_classes), values)
    updates_per_epoch = keras_dp.steps_per_epoch(len(images.x_train), values.batch_size)
    model.compile(
        make_optimizer(values, updates_per_epoch, noise),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    lines = Lines(values.verbose == "1")
    callbacks, data = [], {"x": images.x_train, "y": images.y_train}
    if noise is None:
        data["batch_size"] = values.batch_size
    else:
        sampler = keras_dp.PoissonSampler(
            images.x_train,
            images.y_train,
            batch_size=values.batch_size,
            physical_batch_size=values.physical_batch_size,
        )
        data = {"x": sampler}
        callbacks.append(keras_dp.callbacks.EpsilonLogger(sampler, delta=values.delta, verbose=0))
    if values.ema is not None:
        callbacks.append(keras.callbacks.SwapEMAWeights())
    model.fit(
        **data,
        epochs=values.epochs,
        validation_data=(images.x_test, images.y_test),
        validation_batch_size=500,
        callbacks=[*callbacks, lines],
        verbose=1 if values.verbose == "2" else 0,
    )
    _, accuracy = model.evaluate(images.x_test, images.y_test, 500, verbose=0)
    result = {"seed": seed, "accuracy": float(accuracy), "updates": int(model.optimizer.iterations)}
    if noise is not None:
        result["epsilon"] = lines.epochs[-1]["epsilon"]
    result |= {"epochs": lines.epochs, "seconds": round(time.monotonic() - begun, 1)}
    return model, result


def summary(values, images, noise, runs):
    """What results.json tells of all runs of one kind."""
    accuracies = [one["accuracy"] for one in runs]
    found = {
        "accuracy_mean": float(np.mean(accuracies)),
        "accuracy_spread": float(np.std(accuracies, ddof=1)) if len(runs) > 1 else None,
        "seconds": round(sum(one["seconds"] for one in runs), 1),
    }
    if noise is not None:
        phase = accounting.Phase(
            num_examples=len(images.x_train),
            batch_size=values.batch_size,
            noise_multiplier=noise,
            steps=runs[0]["updates"],
        )
        found |= {
            "epsilon": runs[0]["epsilon"],
            "delta": values.delta,
            "noise_multiplier": noise,
            "epsilon_of_all_runs": accounting.epsilon_of_phases([phase] * len(runs), values.delta),
            "guarantee": keras_dp.privacy_statement(
                num_examples=len(images.x_train),
                batch_size=values.batch_size,
                noise_multiplier=noise,
                delta=values.delta,
                steps=runs[0]["updates"],
            ),
        }
    return found | {"runs": runs}


def load(values):
    """The data of --dataset as the model gets them, with the time that features took."""
    size = None if values.image_size is None else (values.image_size, values.image_size)
    images = datasets.load(values.dataset, size)
    if values.features == "none":
        return images, 0.0
    begun = time.monotonic()
    parts = {
        name: models.scattering_features(getattr(images, name), verbose=values.verbose == "2")
        for name in ("x_train", "x_test")
    }
    return images._replace(**parts), time.monotonic() - begun


def seeds_of(values):
    """The numbers of --seeds.

    Raises:
      ValueError: none, or something else.
    """
    if not values.seeds or not all(re.fullmatch(r"\d+", seed) for seed in values.seeds):
        raise ValueError(f"--seeds takes whole numbers, commas between; received {values.seeds}.")
    return [int(seed) for seed in values.seeds]


def train(values):
    """All runs; writes results.json and the last model.

    Args:
      values: parsed flags.

    Returns:
      dict, what results.json holds.
    """
    seeds = seeds_of(values)
    images, feature_seconds = load(values)
    noise = noise_multiplier(values, len(images.x_train))
    folder = pathlib.Path(values.output_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in seeds:
        model, result = run(values, images, noise, seed)
        runs.append(result)
    kind = "without_privacy" if noise is None else "private"
    model.save(folder / f"{kind}.keras")
    path = folder / "results.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    results[kind] = {
        "dataset": images.name,
        "training_examples": len(images.x_train),
        "test_examples": len(images.x_test),
        "trained_weights": int(sum(np.prod(v.shape) for v in model.trainable_variables)),
        "feature_seconds": round(feature_seconds, 1),
        **summary(values, images, noise, runs),
        "flags": {name: values[name].value for name in values if name not in _HELP},
    }
    path.write_text(json.dumps(results, indent=2) + "\n")
    return results


_HELP = {"help", "helpfull", "helpshort", "helpxml", "?"}


def main(argv):
    """Reads the flags, trains, and prints what came out."""
    values = define_flags()
    commands.parse(values, argv, __doc__, [])
    try:
        results = train(values)
    except (DataNotFoundError, ValueError) as error:
        sys.exit(f"train_classifier.py: {error}")
    for kind, found in results.items():
        spread = found["accuracy_spread"]
        more = "" if spread is None else f" +- {spread:.4f} over {len(found['runs'])} seeds"
        print(f"{kind.replace('_', ' ')}: test accuracy {found['accuracy_mean']:.4f}{more}")
    if "private" in results:
        print(f"\n{results['private']['guarantee']}")


if __name__ == "__main__":
    main(sys.argv)
