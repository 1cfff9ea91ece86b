"""The noise that keeps a training within an epsilon.

    python train_scripts/compute_noise.py --num_examples=60000 --batch_size=256 \
        --epochs=60 --delta=1e-5 --target_epsilon=3

It prints the noise multiplier for the DP optimizer, then the guarantee in words.
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


def define_flags():
    """The flags of this program."""
    values = commands.training_flags()
    commands.length_flags(values)
    flags.DEFINE_float("target_epsilon", None, "The most to spend.", flag_values=values)
    flags.DEFINE_enum(
        "accountant",
        "rdp",
        accounting.ACCOUNTANTS,
        "By which epsilon is within the target; pld needs less noise and some seconds.",
        flag_values=values,
    )
    return values


def main(argv):
    """Prints the noise multiplier of the training that the flags describe."""
    values = define_flags()
    required = ["num_examples", "batch_size", "target_epsilon", "delta"]
    commands.parse(values, argv, __doc__, required)
    run = {
        "num_examples": values.num_examples,
        "batch_size": values.batch_size,
        "delta": values.delta,
        "epochs": values.epochs,
        "steps": values.steps,
        "sampling": values.sampling,
        "neighboring_relation": values.neighboring_relation,
        "capacity": values.capacity,
    }

    def find():
        noise_multiplier = keras_dp.compute_noise_multiplier(
            target_epsilon=values.target_epsilon, accountant=values.accountant, **run
        )
        return noise_multiplier, keras_dp.privacy_statement(
            noise_multiplier=noise_multiplier, **run
        )

    noise_multiplier, guarantee = commands.run(argv, find)
    print(f"noise_multiplier={noise_multiplier!r}\n{guarantee}")


if __name__ == "__main__":
    main(sys.argv)
