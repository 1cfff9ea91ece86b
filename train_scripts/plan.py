"""Epsilon against epochs, noise and batch size, to choose by before training.

    python train_scripts/plan.py --num_examples=60000 --delta=1e-5
    python train_scripts/plan.py --num_examples=60000 --delta=1e-5 --batch_sizes=256,1024 \
        --noise_multipliers=0.8,1,2 --epochs=5,20,60 --target_epsilon=3 --png=plan.png

It prints a table for each batch size. With --target_epsilon the last row is the noise multiplier
that stays within it. --png draws the same.
"""

import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for train_scripts

from absl import flags

import keras_dp
from keras_dp import accounting
from train_scripts import commands

EPOCHS = (1, 3, 10, 30, 100)
NOISE_MULTIPLIERS = (0.5, 0.7, 1.0, 1.5, 2.0, 4.0)
FRACTIONS = (1000, 200, 50, 10)  # of the data in a batch, if no batch size is given


def define_flags():
    """The flags of this program."""
    values = commands.training_flags()
    for name, text in (
        ("batch_sizes", "Expected examples in an update; by default parts of num_examples."),
        ("epochs", f"Lengths of training; by default {EPOCHS}."),
        ("noise_multipliers", f"Noise over clipping norm; by default {NOISE_MULTIPLIERS}."),
    ):
        flags.DEFINE_list(name, None, text + " Separated by commas.", flag_values=values)
    flags.DEFINE_float("target_epsilon", None, "Adds the noise for it.", flag_values=values)
    flags.DEFINE_enum(
        "accountant", "rdp", accounting.ACCOUNTANTS, "pld is tighter, slower.", flag_values=values
    )
    flags.DEFINE_string("png", None, "File to draw to.", flag_values=values)
    return values


def numbers(name, texts, kind, default):
    """The numbers of a list flag.

    Raises:
      ValueError: one of them is no such number, or there are none.
    """
    if texts is None:
        return list(default)
    try:
        found = [kind(text) for text in texts]
    except ValueError:
        found = []
    if not found:
        word = "whole numbers" if kind is int else "numbers"
        raise ValueError(
            f"--{name} takes {word} separated by commas; received {','.join(texts)!r}."
        )
    return found


def plan(values):
    """Epsilon at every combination.

    Args:
      values: parsed flags.

    Returns:
      dict with ``epochs``, ``noise_multipliers`` and ``batch_sizes``: lists of numbers;
      ``epsilons``: float for each (batch_size, noise_multiplier, epochs); ``noise``: float for
      each (batch_size, epochs), if there is a target.

    Raises:
      ValueError: a flag outside its range.
    """
    batch_sizes = numbers("batch_sizes", values.batch_sizes, int, _usual_batches(values))
    epochs = sorted(numbers("epochs", values.epochs, int, EPOCHS))
    noises = sorted(
        numbers("noise_multipliers", values.noise_multipliers, float, NOISE_MULTIPLIERS)
    )
    run = {
        "num_examples": values.num_examples,
        "sampling": values.sampling,
        "neighboring_relation": values.neighboring_relation,
    }
    epsilons, noise = {}, {}
    for number, batch_size in enumerate(batch_sizes, 1):
        if values.accountant == "pld":
            print(f"batch size {number} of {len(batch_sizes)} ...", file=sys.stderr, flush=True)
        for length in epochs:
            steps = _steps(values.num_examples, batch_size, length)
            for noise_multiplier in noises:
                phase = accounting.Phase(
                    batch_size=batch_size, noise_multiplier=noise_multiplier, steps=steps, **run
                )
                epsilon = accounting.epsilon_of_phases([phase], values.delta, values.accountant)
                epsilons[batch_size, noise_multiplier, length] = epsilon
            if values.target_epsilon is not None:
                noise[batch_size, length] = keras_dp.compute_noise_multiplier(
                    target_epsilon=values.target_epsilon,
                    batch_size=batch_size,
                    delta=values.delta,
                    steps=steps,
                    accountant=values.accountant,
                    **run,
                )
    return {
        "epochs": epochs,
        "noise_multipliers": noises,
        "batch_sizes": batch_sizes,
        "epsilons": epsilons,
        "noise": noise,
    }


def _usual_batches(values):
    if values.sampling == "full_batch":
        return [values.num_examples]
    return sorted({max(values.num_examples // fraction, 1) for fraction in FRACTIONS})


def _steps(num_examples, batch_size, epochs):
    if epochs < 1:
        raise ValueError(f"--epochs must be whole numbers of at least 1; received {epochs}.")
    return epochs * keras_dp.steps_per_epoch(num_examples, batch_size)


def table(found, values):
    """The text of :func:`plan`, a block of lines for each batch size."""
    width = max(len(f"{value:.4g}") for value in found["epsilons"].values()) + 2
    blocks = []
    for batch_size in found["batch_sizes"]:
        steps = keras_dp.steps_per_epoch(values.num_examples, batch_size)
        lines = [
            f"batch size {batch_size} ({steps} updates an epoch): epsilon at delta = "
            f"{values.delta:g} by {values.accountant.upper()}",
            "noise \\ epochs" + "".join(f"{length:>{width}}" for length in found["epochs"]),
        ]
        for noise in found["noise_multipliers"]:
            cells = [found["epsilons"][batch_size, noise, length] for length in found["epochs"]]
            lines.append(f"{noise:<14g}" + "".join(f"{cell:>{width}.4g}" for cell in cells))
        if found["noise"]:
            cells = [found["noise"][batch_size, length] for length in found["epochs"]]
            shown = "".join(f"{cell:>{width}.4g}" for cell in cells)
            lines.append(f"noise for {values.target_epsilon:<4g}" + shown)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def draw(found, values, path):
    """Draws epsilon against epochs: a panel for each batch size, a line for each noise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = found["batch_sizes"]
    figure, panels = pyplot.subplots(
        1,
        len(sizes),
        sharey=True,
        squeeze=False,
        figsize=(3 + 2.5 * len(sizes), 4),
        layout="constrained",
    )
    for axes, batch_size in zip(panels[0], sizes):
        for noise in found["noise_multipliers"]:
            epsilons = [found["epsilons"][batch_size, noise, length] for length in found["epochs"]]
            axes.plot(found["epochs"], epsilons, "o-", label=f"noise {noise:g}")
        if values.target_epsilon is not None:
            axes.axhline(values.target_epsilon, color="black", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", yscale="log", title=f"batch size {batch_size:,}", xlabel="epochs")
        axes.set_xticks(found["epochs"], [f"{length:,}" for length in found["epochs"]])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"epsilon at delta = {values.delta:g}, {values.accountant.upper()}")
    panels[0][-1].legend(loc="best", fontsize="small")
    figure.suptitle(f"{values.num_examples:,} examples, sampling: {values.sampling}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv):
    """Prints and draws the plan that the flags ask for."""
    values = define_flags()
    commands.parse(values, argv, __doc__, ["num_examples", "delta"])
    found = commands.run(argv, lambda: plan(values))
    print(table(found, values))
    if values.png:
        try:
            draw(found, values, values.png)
        except (ImportError, OSError, ValueError) as error:
            sys.exit(f"plan.py: --png={values.png} could not be drawn: {error}")
        print(f"\ndrawn to {values.png}")


if __name__ == "__main__":
    main(sys.argv)
