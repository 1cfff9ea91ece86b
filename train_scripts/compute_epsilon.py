"""What a training costs in privacy.

    python train_scripts/compute_epsilon.py --num_examples=60000 --batch_size=256 \
        --noise_multiplier=1.1 --epochs=60 --delta=1e-5

It prints the guarantee in words; with --json as JSON, for programs.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for train_scripts

from absl import flags

import keras_dp
from train_scripts import commands


def define_flags():
    """The flags of this program."""
    values = commands.training_flags()
    commands.length_flags(values)
    flags.DEFINE_float(
        "noise_multiplier",
        None,
        "Standard deviation of the noise over the clipping norm.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "unit", "example", ["example", "user"], "What is clipped.", flag_values=values
    )
    flags.DEFINE_integer(
        "group_size", None, "Adds what holds for so many units of one person.", flag_values=values
    )
    flags.DEFINE_bool("json", False, "Prints JSON.", flag_values=values)
    return values


def main(argv):
    """Prints the guarantee of the training that the flags describe."""
    values = define_flags()
    required = ["num_examples", "batch_size", "noise_multiplier", "delta"]
    commands.parse(values, argv, __doc__, required)
    report = commands.run(
        argv,
        lambda: keras_dp.privacy_report(
            num_examples=values.num_examples,
            batch_size=values.batch_size,
            noise_multiplier=values.noise_multiplier,
            delta=values.delta,
            epochs=values.epochs,
            steps=values.steps,
            sampling=values.sampling,
            neighboring_relation=values.neighboring_relation,
            capacity=values.capacity,
            unit=values.unit,
            group_size=values.group_size,
        ),
    )
    print(json.dumps(report, indent=2, allow_nan=False) if values.json else report["statement"])


if __name__ == "__main__":
    main(sys.argv)
