"""A lower bound on epsilon from training runs, beside the epsilon that is claimed.

    python train_scripts/audit.py --png=audit.png
    python train_scripts/audit.py --audit=many_runs --runs=300 --steps=4 --png=audit.png
    python train_scripts/audit.py --model=model.keras --data=examples.npz --canary=mislabelled

One run trains with many canaries, each in or out by a coin of its own, and guesses the coins
(Steinke et al. 2023, arXiv 2305.08846). Many runs train with one canary and without it (Nasr et
al. 2023, arXiv 2302.07956). By default a small network is trained on the digits of scikit-learn;
--model takes a .keras file that was compiled with a DP optimizer, whose settings are audited, and
--data an .npz file with x and y.

A bound above the claim means that something is broken, and ends the program with status 1. What is
printed is not private: use data that stand in for the private ones.
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
from keras_dp import accounting, auditing
from train_scripts import arrays, commands, plots

CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)


def define_flags():
    """The flags of this program."""
    values = flags.FlagValues()
    for define, name, default, text in (
        (flags.DEFINE_string, "data", "digits", "digits, or an .npz file with x and y."),
        (flags.DEFINE_string, "model", None, "A .keras file with a DP optimizer."),
        (flags.DEFINE_float, "learning_rate", 0.1, "Of DPSGD, without --model."),
        (flags.DEFINE_float, "l2_norm_clip", 1.0, "Without --model."),
        (flags.DEFINE_float, "noise_multiplier", 1.5, "Without --model."),
        (flags.DEFINE_integer, "batch_size", 1400, "Expected in an update, without --model."),
        (flags.DEFINE_integer, "steps", 10, "Updates of a training."),
        (flags.DEFINE_integer, "canaries", 1000, "Of the one run."),
        (flags.DEFINE_integer, "runs", 200, "Trainings with the canary, and as many without."),
        (flags.DEFINE_float, "delta", 1e-5, "Of the claim and of the bound."),
        (flags.DEFINE_string, "png", None, "File to draw to."),
    ):
        define(name, default, text, flag_values=values)
    for name, choices, text in (
        ("audit", ("one_run", "many_runs"), "Which audit."),
        ("canary", ("worst_case", "mislabelled"), "The largest gradients, or wrong labels."),
        ("adversary", ("white_box", "black_box"), "Sees every update, or the trained model."),
        ("accountant", accounting.ACCOUNTANTS[::-1], "By which the claim is computed."),
    ):
        flags.DEFINE_enum(name, choices[0], choices, text, flag_values=values)
    flags.DEFINE_bool("json", False, "Prints JSON.", flag_values=values)
    return values


def audit(values):
    """The audit that the flags ask for.

    Raises:
      ValueError: a flag outside its range, or data and model that do not fit.
    """
    x, y = arrays.load_examples(values.data)
    model = _model(values, x, y)
    settings = {
        "steps": values.steps,
        "delta": values.delta,
        "adversary": values.adversary,
        "accountant": values.accountant,
    }
    if values.audit == "many_runs":
        canary = None
        if values.canary == "mislabelled":
            canary, x, y = _mislabelled(x, y, 1)
        return auditing.audit_many_runs(
            model,
            x,
            y,
            canary=canary,
            runs=values.runs,
            verbose=0 if values.json else 1,
            **settings,
        )
    canaries = values.canaries
    if values.canary == "mislabelled":
        canaries, x, y = _mislabelled(x, y, canaries)
    return auditing.audit_one_run(model, x, y, canaries=canaries, **settings)


def _model(values, x, y):
    if values.model:
        return arrays.load_model(values.model)
    model = arrays.small_classifier(x.shape[1:], int(y.max()) + 1)
    model.compile(
        keras_dp.DPSGD(
            values.learning_rate,
            l2_norm_clip=values.l2_norm_clip,
            noise_multiplier=values.noise_multiplier,
            batch_size=values.batch_size,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def _mislabelled(x, y, number):
    """The last examples with another label each, as canaries, and the examples that are left."""
    if not 0 < number < len(x) or y.dtype.kind not in "iu" or y.max() < 1:
        raise ValueError(
            f"{number} mislabelled canaries need more examples than that, and integer labels of at "
            f"least two classes; received {len(x)} examples with labels of type {y.dtype}."
        )
    wrong = y[-number:] + np.random.default_rng().integers(1, y.max() + 1, y[-number:].shape)
    canaries = (x[-number:], (wrong % (y.max() + 1)).astype(y.dtype))
    return canaries, x[:-number], y[:-number]


def bounds(found):
    """dict: each kind of bound that the audit has, at each of ``CONFIDENCES``."""
    kinds = {"epsilon": found.epsilon, "gaussian_epsilon": found.gaussian_epsilon}
    return {
        name: {str(confidence): bound(confidence) for confidence in CONFIDENCES}
        for name, bound in kinds.items()
    }


def _is_bound(found):
    """Whether ``gaussian_epsilon`` is a bound and no estimate."""
    return isinstance(found, auditing.ManyRunsAudit) and found.is_gaussian


def draw(found, path):
    """Draws the bounds against their confidence, and the claim."""
    kind = "lower bound" if _is_bound(found) else "estimate"
    words = {"epsilon": "lower bound", "gaussian_epsilon": f"{kind} for Gaussian noise"}
    with plots.figure(path, figsize=(7, 4.2)) as axes:
        places = range(len(CONFIDENCES))
        for name, values in bounds(found).items():
            axes.plot(places, list(values.values()), "o-", label=words[name])
        axes.axhline(found.claimed_epsilon, color=plots.COLOURS[3], linestyle="--")
        axes.annotate(
            f"claimed: {found.claimed_epsilon:.3g}",
            (0, found.claimed_epsilon),
            xytext=(0, 4),
            textcoords="offset points",
            color=plots.COLOURS[3],
        )
        axes.set_xticks(places, [f"{100 * confidence:g} %" for confidence in CONFIDENCES])
        axes.set_ylim(bottom=0, top=1.15 * axes.get_ylim()[1])
        axes.set(xlabel="confidence", ylabel=f"epsilon at delta = {found.delta:g}")
        axes.set_title(f"{found.phase.steps} updates, sampling: {found.phase.sampling}")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)


def main(argv):
    """Prints and draws the audit that the flags ask for."""
    values = define_flags()
    commands.parse(values, argv, __doc__, [])
    found = commands.run(argv, lambda: audit(values))
    if values.json:
        report = {
            "delta": found.delta,
            "claimed_epsilon": found.claimed_epsilon,
            "refuted": found.refutes_claim(),
            "bounds": bounds(found),
            "phase": found.phase.to_dict(),
        }
        print(json.dumps(report, indent=2))
    else:
        print(found)
        if not _is_bound(found):
            print(f"Estimate, no bound, for Gaussian noise: {found.gaussian_epsilon():.3g}.")
    if values.png:
        try:
            draw(found, values.png)
        except (ImportError, OSError, ValueError) as error:
            sys.exit(f"audit.py: --png={values.png} could not be drawn: {error}")
        print(f"drawn to {values.png}", file=sys.stderr)
    if found.refutes_claim():
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv)
