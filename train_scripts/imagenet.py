"""Private ImageNet: pretrain on a public data set, freeze, fine-tune privately.

    python train_scripts/imagenet.py --disable_dp --dataset=places365 --model_dir=places
    python train_scripts/imagenet.py --dataset=imagenet --model_dir=private \
        --finetune_path=places/model.keras --num_layers_to_freeze=6 \
        --train_device_batch_size=64 --grad_acc_steps=64 --base_learning_rate=0.03 \
        --num_train_epochs=70 --target_epsilon=10

The recipe of Kurakin et al. 2022 (Toward Training at ImageNet Scale with Differential Privacy,
arXiv 2201.12328) under the names of its flags; docs/recipes.md has them all, and what differs. A
run that is killed goes on when the same command is given again.

It writes into --model_dir: checkpoints, model.keras, metrics.jsonl (a line for each evaluation),
results.json, and with privacy privacy_ledger.json, which counts every update before it is made.
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
from train_scripts import commands, image_folder, schedules, strategies, streams, tfds_data
from train_scripts.crops import Crop
from train_scripts.errors import DataNotFoundError

# name: (data set of TensorFlow Datasets, examples to train on)
DATASETS = {"imagenet": ("imagenet2012", 1_281_167), "places365": ("places365_small", 1_803_460)}

PLAIN = {
    "sgd": keras.optimizers.SGD,
    "momentum": keras.optimizers.SGD,
    "adam": keras.optimizers.Adam,
    "lamb": keras.optimizers.Lamb,
}
PRIVATE = {
    "sgd": keras_dp.DPSGD,
    "momentum": keras_dp.DPMomentum,
    "adam": keras_dp.DPAdam,
    "lamb": keras_dp.DPLamb,
}
ARGUMENTS = {"momentum": {"momentum": 0.9, "nesterov": True}}

# Flags that a run may change when it goes on: they do not change what is learned.
CHANGEABLE = {"keep_ckpts", "eval_device_batch_size", "max_eval_batches", "eval_every_n_steps"}
CHANGEABLE |= {"threads", "tfds_data_dir", "model_dir", "verbose"}


def define_flags():
    """The flags of this program; those of dp-imagenet have their names and defaults."""
    values = flags.FlagValues()

    def add(define, name, default, text, *rest, **more):
        define(name, default, text, *rest, flag_values=values, **more)

    def choice(name, default, allowed, text):
        flags.DEFINE_enum(name, default, allowed, text, flag_values=values)

    text, integer, real, boolean = (
        flags.DEFINE_string,
        flags.DEFINE_integer,
        flags.DEFINE_float,
        flags.DEFINE_boolean,
    )
    add(text, "model_dir", None, "Folder of checkpoints and results.")
    add(integer, "keep_ckpts", 4, "Checkpoints, one an epoch, that are kept.", 1)
    add(text, "dataset", "imagenet", "imagenet, places365, folder:PATH or tfds:NAME.")
    add(text, "tfds_data_dir", None, "Where TensorFlow Datasets are; else TFDS_DATA_DIR.")
    add(integer, "image_size", 224, "Side of the images.", 8)
    add(text, "model", "resnet18", "resnet18, 34, 50, rn_cX_bA_B_C_D, wrn_D_W or vit_b16.")
    add(integer, "norm_groups", 32, "Groups of the group normalisation.", 1)
    add(integer, "train_device_batch_size", 128, "Examples at a time on each replica.", 1)
    add(integer, "grad_acc_steps", 1, "Batches of all replicas that make one update.", 1)
    add(integer, "eval_device_batch_size", 250, "Test images at a time on each replica.", 1)
    add(integer, "max_eval_batches", -1, "Batches of an evaluation; 0 or less: all.")
    add(integer, "eval_every_n_steps", 1000, "Updates between evaluations in an epoch.", 1)
    add(integer, "num_train_epochs", 10, "Epochs of ceil(examples / batch) updates.", 1)
    add(real, "base_learning_rate", 2.0, "Learning rate for each 256 examples of an update.", 0)
    add(real, "lr_warmup_epochs", 1.0, "Epochs in which the learning rate rises.", 0)
    choice("lr_schedule", "cos", schedules.SCHEDULES, "What follows.")
    choice("optimizer", "momentum", sorted(PRIVATE), "Optimizer.")
    add(real, "weight_decay", 1e-4, "Of the L2 penalty on kernels, wd / 2 |w|^2.", 0)
    add(integer, "rnd_seed", 0, "Of weights, order and crops without privacy. Never of noise.", 0)
    add(boolean, "disable_dp", False, "Train without privacy.")
    add(real, "dp_sigma", None, "Noise multiplier. Or:", 0)
    add(real, "target_epsilon", None, "The noise that makes the whole run cost this.", 0)
    add(real, "dp_clip_norm", 1.0, "Bound on each example's gradient norm.", 0)
    add(real, "dp_delta", 1e-6, "Delta of the guarantee.", 0, 1)
    choice("sampling", "poisson", ("poisson", "shuffle"), "How private batches are formed.")
    add(text, "ledger", None, "The data set's privacy ledger; by default one in --model_dir.")
    add(text, "finetune_path", None, "A model.keras, or a folder with one, to start from.")
    add(boolean, "finetune_cut_last_layer", True, "Give that model a new last layer.")
    add(real, "finetune_init_scale", 0.0, "Scale of its first weights; 0 for zeros.", 0)
    add(integer, "num_layers_to_freeze", 0, "Parts (models.parts) from the input on to freeze.", 0)
    strategies.define_flags(values)
    add(integer, "threads", 16, "Threads that read images.", 1)
    add(boolean, "random_crops", True, "Crop and mirror training images at random.")
    add(boolean, "verbose", False, "Show a progress bar.")
    return values


def open_data(values):
    """The data set of --dataset, as ``tfds_data.Classification``.

    Raises:
      DataNotFoundError: it is not on this machine; the message says how to get it.
      ValueError: a name that is none, or another number of examples than it must have.
    """
    kind, _, rest = values.dataset.partition(":")
    size = (values.image_size, values.image_size)
    if kind == "folder" and rest:
        return image_folder.open_image_folder(rest, size)
    if values.tfds_data_dir:
        os.environ["TFDS_DATA_DIR"] = values.tfds_data_dir
    if kind == "tfds" and rest:
        return tfds_data.open_tfds(rest, size)
    if values.dataset not in DATASETS:
        raise ValueError(
            f"--dataset takes {', '.join(DATASETS)}, folder:PATH or tfds:NAME; received "
            f"{values.dataset!r}."
        )
    name, examples = DATASETS[values.dataset]
    found = tfds_data.open_tfds(name, size)
    if len(found.train) != examples:
        raise ValueError(f"{name} has {len(found.train)} training images, expected {examples}.")
    return found


def build_model(name, image_size, num_classes, groups):
    """The network that --model names.

    Args:
      name: "resnet18", "resnet34" or "resnet50", of version 2; "rn_cX_bA_B_C_D" or
        "rnb_cX_bA_B_C_D", a ResNet of X channels in the first stage and A, B, C, D blocks in the
        four, rnb with bottlenecks; "wrn_D_W", a wide ResNet; "vit_b16" and the like.
      image_size: side of the images.
      num_classes: number of logits.
      groups: of the group normalisation.

    Raises:
      ValueError: for another name.
    """
    shape, norm = (image_size, image_size, 3), {"groups": groups, "name": name}
    stem = "large" if image_size > 64 else "small"
    if match := re.fullmatch(r"resnet(18|34|50)", name):
        depth = int(match[1])
        return models.resnet(shape, num_classes, depth, stem, version=2, **norm)
    if match := re.fullmatch(r"rn(b?)_c(\d+)_b(\d+)_(\d+)_(\d+)_(\d+)", name):
        blocks = tuple(map(int, match.groups()[2:]))
        custom = {"blocks": blocks, "bottleneck": bool(match[1]), "width": int(match[2])}
        return models.resnet(shape, num_classes, None, stem, version=2, **custom, **norm)
    if match := re.fullmatch(r"wrn_(\d+)_(\d+)", name):
        return models.wide_resnet(shape, num_classes, int(match[1]), int(match[2]), **norm)
    if match := re.fullmatch(r"vit_(ti|s|b|l|h)(\d+)", name):
        variant = f"{match[1].capitalize()}/{match[2]}"
        return models.vit_variant(variant, image_size, num_classes, name=name)
    raise ValueError(
        "--model takes resnet18, resnet34, resnet50, rn_cX_bA_B_C_D, rnb_cX_bA_B_C_D, wrn_D_W or "
        f"vit_b16 (ti, s, b, l, h and the patch's side); received {name!r}."
    )


def starting_model(values, num_classes):
    """The model as it is before the first update: new, or cut, and frozen as far as asked."""
    if not values.finetune_path:
        model = build_model(values.model, values.image_size, num_classes, values.norm_groups)
    else:
        path = pathlib.Path(values.finetune_path).expanduser()
        path = path / "model.keras" if path.is_dir() else path
        if not path.is_file():
            raise DataNotFoundError(
                f"--finetune_path={values.finetune_path}: there is no file {path}. Give a .keras "
                "file, or the --model_dir of a run that has ended."
            )
        model = keras.saving.load_model(path, compile=False)
        if values.finetune_cut_last_layer:
            model = models.replace_head(model, num_classes, values.finetune_init_scale)
        expected = (values.image_size, values.image_size, 3), num_classes
        found = tuple(model.input_shape[1:]), model.output_shape[-1]
        if found != expected:
            raise ValueError(
                f"{path} takes images of shape {found[0]} and has {found[1]} classes; "
                f"--image_size and --dataset make {expected[0]} and {expected[1]}. Another number "
                "of classes needs --finetune_cut_last_layer."
            )
    frozen = models.freeze_parts(model, values.num_layers_to_freeze)
    if frozen:
        print(f"frozen: {', '.join(frozen)}", flush=True)
    penalize_kernels(model, values.weight_decay)
    return model


def penalize_kernels(model, weight_decay):
    """Adds ``weight_decay / 2 * |w|^2`` of every trained kernel to the loss.

    It depends on no example, so its gradient is added after clipping and noise.
    """
    if weight_decay:
        for variable in model.trainable_variables:
            if variable.name == "kernel":
                variable.regularizer = keras.regularizers.L2(weight_decay / 2)


class Plan:
    """The numbers of a run that follow from its flags and the data's size.

    Attributes:
      examples: N. device_batch: examples at a time, over all replicas. batch_size: of an update.
      updates_per_epoch: ceil(N / batch_size). updates: of the whole run.
      noise_multiplier: float, or None without privacy.
    """

    def __init__(self, values, examples, replicas):
        self.examples = examples
        self.device_batch = values.train_device_batch_size * replicas
        self.batch_size = self.device_batch * values.grad_acc_steps
        if self.batch_size > examples:
            raise ValueError(
                f"An update has {values.train_device_batch_size} x {replicas} x "
                f"{values.grad_acc_steps} = {self.batch_size} examples (batch, replicas, "
                f"--grad_acc_steps), but there are only {examples}."
            )
        self.updates_per_epoch = keras_dp.steps_per_epoch(examples, self.batch_size)
        self.updates = values.num_train_epochs * self.updates_per_epoch
        self.noise_multiplier = None if values.disable_dp else self._noise(values)

    def _noise(self, values):
        if (values.dp_sigma is None) == (values.target_epsilon is None):
            raise ValueError(
                "Give one of --dp_sigma and --target_epsilon, or --disable_dp. Received: "
                f"--dp_sigma={values.dp_sigma} --target_epsilon={values.target_epsilon}."
            )
        if values.dp_sigma is not None:
            return values.dp_sigma
        return keras_dp.compute_noise_multiplier(
            target_epsilon=values.target_epsilon,
            num_examples=self.examples,
            batch_size=self.batch_size,
            delta=values.dp_delta,
            epochs=values.num_train_epochs,
            sampling=values.sampling,
        )


def make_optimizer(values, plan):
    """The optimizer of --optimizer, with its schedule, private or not."""
    accumulated = values.grad_acc_steps if values.grad_acc_steps > 1 else None
    rate = schedules.WarmUp(
        values.base_learning_rate * plan.batch_size / 256,
        plan.updates,
        min(round(values.lr_warmup_epochs * plan.updates_per_epoch), plan.updates),
        values.lr_schedule,
        steps_per_update=accumulated or 1 if values.disable_dp else 1,
    )
    arguments = ARGUMENTS.get(values.optimizer, {})
    if values.disable_dp:
        make = PLAIN[values.optimizer]
        return make(rate, gradient_accumulation_steps=accumulated, **arguments)
    return PRIVATE[values.optimizer](
        rate,
        l2_norm_clip=values.dp_clip_norm,
        noise_multiplier=plan.noise_multiplier,
        batch_size=plan.batch_size,
        # The pieces of one Poisson draw make an update by themselves.
        gradient_accumulation_steps=None if values.sampling == "poisson" else accumulated,
        **arguments,
    )


def make_batches(values, data, plan):
    """What ``fit`` trains on."""
    crop = Crop(data.to_pair, values.image_size, random=values.random_crops)
    if values.disable_dp or values.sampling == "shuffle":
        stream = streams.Shuffled(
            data.train, crop, values.rnd_seed, values.threads, random=crop.random
        )
        return keras_dp.FixedBatches(
            stream, batch_size=plan.device_batch, num_examples=plan.examples
        )
    return keras_dp.PoissonSampler(
        data.train,
        batch_size=plan.batch_size,
        physical_batch_size=plan.device_batch,
        map_fn=crop,
        threads=values.threads,
    )


class Evaluation:
    """Accuracy and loss on the test images, of a model as it is.

    Args:
      model: ``keras.Model`` that makes logits.
      data: ``tfds_data.Classification``.
      values: flags.
      replicas: int.
    """

    def __init__(self, model, data, values, replicas):
        self._model, self._examples = model, data.test
        self._crop = Crop(data.to_pair, values.image_size, random=False)
        self._threads = values.threads
        self._batch = values.eval_device_batch_size * replicas
        most = len(data.test)
        if values.max_eval_batches > 0:
            most = min(most, values.max_eval_batches * self._batch)
        # Test files are often in the order of their classes: a part of them is drawn from all.
        order = np.random.default_rng(0).permutation(len(data.test))[:most]
        self._indices = np.sort(order).tolist()

    def __call__(self):
        """dict with "accuracy" and "loss"."""
        right, loss = 0, 0.0
        pairs = streams.mapped(
            lambda index: self._crop(self._examples[index]), self._indices, self._threads
        )
        for images, labels in self._batches(pairs):
            logits = self._model.predict_on_batch(images)[: len(labels)]
            shifted = logits - logits.max(-1, keepdims=True)
            of_label = shifted[np.arange(len(labels)), labels]
            loss += float(np.sum(np.log(np.exp(shifted).sum(-1)) - of_label))
            right += int(np.sum(logits.argmax(-1) == labels))
        return {"accuracy": right / len(self._indices), "loss": loss / len(self._indices)}

    def _batches(self, pairs):
        """Batches of one size, the last one filled up; labels of the real rows only."""
        images, labels = [], []
        for image, label in pairs:
            images.append(image)
            labels.append(label)
            if len(images) == self._batch:
                yield np.stack(images), np.array(labels)
                images, labels = [], []
        if images:
            filled = np.zeros((self._batch, *images[0].shape), np.float32)
            filled[: len(images)] = images
            yield filled, np.array(labels)


class Reports(keras.callbacks.Callback):
    """Evaluates every so many updates and at the end of epochs, prints, and writes metrics.jsonl.

    Args:
      evaluation: :class:`Evaluation`.
      path: of metrics.jsonl.
      every: int, updates.
      epsilon: function without arguments, of what was spent; None without privacy.
    """

    def __init__(self, evaluation, path, every, epsilon):
        super().__init__()
        self._evaluation, self._path, self._every = evaluation, path, every
        self._epsilon = epsilon
        self.last = None

    def on_train_begin(self, logs=None):
        """Remembers what was evaluated."""
        self._seen = int(self.model.optimizer.iterations.numpy())
        self._begun = time.monotonic()

    def on_train_batch_end(self, batch, logs=None):
        """Evaluates at each multiple of ``every`` updates."""
        made = int(self.model.optimizer.iterations.numpy())
        if made // self._every > self._seen // self._every:
            self._report(made, None)
        self._seen = made

    def on_epoch_end(self, epoch, logs=None):
        """Evaluates, and tells what the epoch has cost."""
        self._report(int(self.model.optimizer.iterations.numpy()), epoch + 1)

    def _report(self, updates, epoch):
        if self.last is None or self.last["update"] != updates:
            self._figures = self._evaluation()
        record = {"update": updates, "epoch": epoch, **self._figures}
        record["seconds"] = round(time.monotonic() - self._begun, 1)
        if self._epsilon is not None:
            record["epsilon"] = self._epsilon()
        with open(self._path, "a") as file:
            file.write(json.dumps(record) + "\n")
        self.last = record
        spent = "" if self._epsilon is None else f", epsilon {record['epsilon']:.3f}"
        at = f"update {updates}" if epoch is None else f"epoch {epoch}, update {updates}"
        print(f"{at}: test accuracy {record['accuracy']:.4f}{spent}", flush=True)


class Checkpoints(keras.callbacks.Callback):
    """Saves the model after each epoch, as ckpt-0001.keras and so on, and keeps the last few.

    Args:
      folder: path.
      keep: int.
    """

    def __init__(self, folder, keep):
        super().__init__()
        self._folder, self._keep = folder, keep

    def on_epoch_end(self, epoch, logs=None):
        """Saves, then deletes what is older."""
        self.model.save(self._folder / f"ckpt-{epoch + 1:04d}.keras")
        for old in sorted(self._folder.glob("ckpt-*.keras"))[: -self._keep]:
            old.unlink()


def same_run(values):
    """Notes the flags of a new run; refuses those that would make another one of a begun run.

    Raises:
      ValueError: the folder holds a run with other flags, or one that has ended.
    """
    folder = pathlib.Path(values.model_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "results.json").is_file():
        raise ValueError(
            f"The run in {folder} has ended, its results.json is there. To train again (which "
            "costs privacy again) pass another --model_dir, and the same --ledger."
        )
    wanted = {name: values[name].value for name in values if name not in _HELP}
    path = folder / "flags.json"
    if path.is_file():
        before = json.loads(path.read_text())
        names = [n for n in sorted(wanted) if n not in CHANGEABLE and before.get(n) != wanted[n]]
        if names:
            told = ", ".join(f"--{n}={before.get(n)} is now {wanted[n]}" for n in names)
            raise ValueError(
                f"{folder} holds another run: {told}. Give the flags that it was begun with, or "
                "another --model_dir."
            )
    else:
        path.write_text(json.dumps(wanted, indent=2) + "\n")
    return folder


_HELP = {"help", "helpfull", "helpshort", "helpxml", "?"}


def train(values):
    """The whole run.

    Args:
      values: parsed flags.

    Returns:
      dict, what results.json holds.
    """
    begun = time.monotonic()
    strategy = strategies.from_flags(values)  # before anything else uses TensorFlow
    replicas = strategy.num_replicas_in_sync
    data = open_data(values)
    plan = Plan(values, len(data.train), replicas)
    folder = same_run(values)
    keras.utils.set_random_seed(values.rnd_seed)
    batches = make_batches(values, data, plan)
    with strategy.scope():
        model = starting_model(values, data.num_classes)
        model.compile(
            make_optimizer(values, plan),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    print(
        f"{data.name}: {plan.examples:,} training images, {len(data.test):,} to test on; "
        f"{plan.updates} updates of {plan.batch_size:,} examples",
        flush=True,
    )
    callbacks, ledger = [], None
    if not values.disable_dp:
        where = values.ledger or folder / "privacy_ledger.json"
        ledger = keras_dp.PrivacyLedger(where, num_examples=plan.examples, name=data.name)
        spending = {"delta": values.dp_delta, "ledger": ledger}
        callbacks.append(keras_dp.callbacks.EpsilonLogger(batches, verbose=1, **spending))
        if values.target_epsilon is not None:
            budget = keras_dp.callbacks.PrivacyBudget
            callbacks.append(budget(batches, max_epsilon=values.target_epsilon, **spending))
    reports = Reports(
        Evaluation(model, data, values, replicas),
        folder / "metrics.jsonl",
        values.eval_every_n_steps,
        ledger and (lambda: ledger.epsilon(values.dp_delta)),
    )
    callbacks += [reports, Checkpoints(folder, values.keep_ckpts)]
    callbacks.append(keras.callbacks.BackupAndRestore(folder / "backup"))
    model.fit(
        batches, epochs=values.num_train_epochs, callbacks=callbacks, verbose=int(values.verbose)
    )
    model.save(folder / "model.keras")
    results = {
        "dataset": data.name,
        "model": model.name,
        "trained_weights": int(sum(np.prod(v.shape) for v in model.trainable_variables)),
        "updates": int(model.optimizer.iterations.numpy()),
        "batch_size": plan.batch_size,
        "noise_multiplier": plan.noise_multiplier,
        **Evaluation(model, data, values, replicas)(),
        "seconds": round(time.monotonic() - begun, 1),
    }
    if ledger is not None:
        results |= {"epsilon": ledger.epsilon(values.dp_delta), "delta": values.dp_delta}
        results["guarantee"] = ledger.statement(values.dp_delta)
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def main(argv):
    """Reads the flags and trains."""
    values = define_flags()
    commands.parse(values, argv, __doc__, ["model_dir"])
    try:
        results = train(values)
    except (DataNotFoundError, ValueError) as error:
        sys.exit(f"imagenet.py: {error}")
    print(f"test accuracy {results['accuracy']:.4f} in {values.model_dir}")


if __name__ == "__main__":
    main(sys.argv)
