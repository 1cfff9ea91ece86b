"""Who was in the training set? Attacks on a model trained with and without privacy.

    python train_scripts/membership.py --png=membership.png
    python train_scripts/membership.py --target_epsilon=1 --models=32 --data=examples.npz

Trains --models networks without privacy and as many privately, each on a random half of the
examples, and attacks each with the others as shadow models: by a threshold on the loss, and by LiRA
(Carlini et al. 2022, arXiv 2112.03570). It prints the area under the curve (0.5 is guessing) and
the true positive rate at small false positive rates, and draws the curves.

By default the data are the 1,797 digits of scikit-learn. --data takes an .npz file with x and
integer labels y, --model a .keras file of a classifier, which is trained from new weights.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for train_scripts

import keras
import numpy as np
from absl import flags

import keras_dp
from keras_dp import auditing
from train_scripts import arrays, commands, plots

KINDS = ("not private", "private")
LINES = {"loss threshold": ":", "LiRA": "-"}  # what is drawn


def define_flags():
    """The flags of this program."""
    values = flags.FlagValues()
    for define, name, default, text in (
        (flags.DEFINE_string, "data", "digits", "digits, or an .npz file with x and y."),
        (flags.DEFINE_string, "model", None, "A .keras file; by default one hidden layer."),
        (flags.DEFINE_bool, "from_logits", True, "Whether the model's outputs are logits."),
        (flags.DEFINE_integer, "models", 16, "Networks of each kind."),
        (flags.DEFINE_float, "target_epsilon", 3.0, "Of a private training."),
        (flags.DEFINE_float, "delta", 1e-4, "Of a private training."),
        (flags.DEFINE_integer, "private_epochs", 20, "Of Poisson batches."),
        (flags.DEFINE_integer, "batch_size", 200, "Expected in a private update."),
        (flags.DEFINE_float, "l2_norm_clip", 1.0, "Of a private training."),
        (flags.DEFINE_float, "private_learning_rate", 0.01, "Of DPAdam."),
        (flags.DEFINE_integer, "epochs", 30, "Without privacy, in batches of 64."),
        (flags.DEFINE_float, "learning_rate", 0.003, "Of Adam, without privacy."),
        (flags.DEFINE_string, "png", None, "File to draw to."),
        (flags.DEFINE_bool, "json", False, "Prints JSON."),
    ):
        define(name, default, text, flag_values=values)
    return values


class Trainer:
    """Trains one compiled model again and again, from new random weights."""

    def __init__(self, values, private, shape, classes, size):
        if values.model:
            self._template = keras.models.clone_model(arrays.load_model(values.model))
        else:
            self._template = arrays.small_classifier(shape, classes)
        self._model = keras.models.clone_model(self._template)
        self._values, self._private = values, private
        if private:
            noise_multiplier = keras_dp.compute_noise_multiplier(
                target_epsilon=values.target_epsilon,
                num_examples=size,
                batch_size=values.batch_size,
                delta=values.delta,
                epochs=values.private_epochs,
                accountant="pld",
            )
            optimizer = keras_dp.DPAdam(
                values.private_learning_rate,
                l2_norm_clip=values.l2_norm_clip,
                noise_multiplier=noise_multiplier,
                batch_size=values.batch_size,
            )
        else:
            optimizer = keras.optimizers.Adam(values.learning_rate)
        self._model.compile(
            optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=values.from_logits),
        )
        optimizer.build(self._model.trainable_variables)
        self._start = [(v, v.numpy()) for v in optimizer.variables]

    def train(self, x, y):
        """A freshly trained model; the same object every time."""
        self._model.set_weights(keras.models.clone_model(self._template).get_weights())
        for variable, value in self._start:
            variable.assign(value)
        values = self._values
        if self._private:
            updates = values.private_epochs * keras_dp.steps_per_epoch(len(x), values.batch_size)
            sampler = keras_dp.PoissonSampler(
                x, y, batch_size=values.batch_size, steps_per_epoch=updates
            )
            self._model.fit(sampler, verbose=0)
        else:
            self._model.fit(x, y, batch_size=64, epochs=values.epochs, verbose=0)
        return self._model


def halves(models, examples, rng):
    """Bool ``[models, examples]``: pairs of models share the examples out between them.

    So every example is in half of the models, and every model has half of the examples.
    """
    members = np.zeros((models, examples), bool)
    for k in range(0, models, 2):
        half = rng.permutation(examples)[: examples // 2]
        members[k, half] = True
        if k + 1 < models:
            others = np.flatnonzero(~members[k])[: examples // 2]
            members[k + 1, others] = True
    return members


def attack(values):
    """Trains and attacks both kinds of models.

    Returns:
      dict from "private" and "not private" to a dict with ``accuracy``, of examples that were not
      trained on, and ``reports``, a list of ``keras_dp.auditing.AttackReport``.

    Raises:
      ValueError: a flag outside its range, or data that do not fit.
    """
    x, y = arrays.load_examples(values.data)
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise ValueError(f"--data needs integer labels y [N]; received {y.dtype} {y.shape}.")
    if values.models < 6:
        raise ValueError(f"--models must be at least 6, for shadows; received {values.models}.")
    classes, size = int(y.max()) + 1, len(x) // 2
    bar = keras.utils.Progbar(
        2 * values.models, verbose=0 if values.json else 1, unit_name="training"
    )
    found = {}
    for kind in KINDS:
        trainer = Trainer(values, kind == "private", x.shape[1:], classes, size)
        members = halves(values.models, len(x), np.random.default_rng())
        confidences, right = [], []
        for mine in members:
            model = trainer.train(x[mine], y[mine])
            outputs = model.predict(x, batch_size=512, verbose=0)
            confidences.append(auditing.label_confidences(outputs, y, values.from_logits))
            right.append(np.mean((outputs.argmax(-1) == y)[~mine]))
            bar.add(1)
        found[kind] = {
            "accuracy": float(np.mean(right)),
            "reports": _reports(np.stack(confidences), members),
        }
    return found


def _reports(confidences, members):
    scores = {
        "loss threshold": confidences,
        "LiRA, offline": auditing.cross_lira_scores(confidences, members, offline=True),
        "LiRA": auditing.cross_lira_scores(confidences, members),
    }
    return [auditing.attack_report(name, values, members) for name, values in scores.items()]


def table(found, values):
    """The text of :func:`attack`."""
    lines = [
        f"{values.models} models of each kind; private: epsilon <= {values.target_epsilon:g} at "
        f"delta = {values.delta:g}",
        f"{'':<14}{'attack':<18}{'AUC':>7}{'TPR at FPR 0.1 %':>20}{'at 1 %':>9}{'at 10 %':>9}",
    ]
    for kind, result in found.items():
        for report in result["reports"]:
            rates = [report.tpr_at(rate) for rate in (0.001, 0.01, 0.1)]
            lines.append(
                f"{kind:<14}{report.name:<18}{report.auc:>7.3f}{rates[0]:>20.4f}"
                f"{rates[1]:>9.4f}{rates[2]:>9.4f}"
            )
    for kind, result in found.items():
        lines.append(f"accuracy on examples not trained on, {kind}: {result['accuracy']:.3f}")
    return "\n".join(lines)


def draw(found, values, path):
    """Draws the curves on logarithmic axes, where leaks of a few people show."""
    with plots.figure(path, figsize=(6.4, 5.2)) as axes:
        for kind, colour in zip(KINDS, plots.COLOURS[1::-1]):
            for report in found[kind]["reports"]:
                if report.name not in LINES:
                    continue
                axes.plot(
                    report.false_positive_rates,
                    report.true_positive_rates,
                    LINES[report.name],
                    color=colour,
                    label=f"{kind}, {report.name}: AUC {report.auc:.3f}",
                )
        axes.plot([1e-6, 1], [1e-6, 1], color=plots.INK, linewidth=0.8, label="guessing")
        axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.2))
        axes.set(xlabel="false positive rate", ylabel="true positive rate")
        axes.set_title(
            f"Membership inference: epsilon {values.target_epsilon:g} against none", fontsize=11
        )
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower right", fontsize=9)


def main(argv):
    """Prints and draws the report that the flags ask for."""
    values = define_flags()
    commands.parse(values, argv, __doc__, [])
    found = commands.run(argv, lambda: attack(values))
    if values.json:
        print(
            json.dumps(
                {
                    kind: result | {"reports": [r.to_dict() for r in result["reports"]]}
                    for kind, result in found.items()
                },
                indent=2,
            )
        )
    else:
        print(table(found, values))
    if values.png:
        try:
            draw(found, values, values.png)
        except (ImportError, OSError, ValueError) as error:
            sys.exit(f"membership.py: --png={values.png} could not be drawn: {error}")
        print(f"drawn to {values.png}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv)
