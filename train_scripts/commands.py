"""What the accounting programs share: their flags, and errors that are one message."""

import sys
import warnings

from absl import flags

from keras_dp import accounting


def training_flags():
    """Fresh flags that describe a training, so that a program can be called again and again.

    Returns:
      ``absl.flags.FlagValues``.
    """
    values = flags.FlagValues()
    flags.DEFINE_integer("num_examples", None, "Examples in the training set.", flag_values=values)
    flags.DEFINE_float(
        "delta", None, "Delta of the guarantee; well below 1 / num_examples.", flag_values=values
    )
    flags.DEFINE_enum(
        "sampling", "poisson", accounting.SAMPLINGS, "How batches are formed.", flag_values=values
    )
    flags.DEFINE_enum(
        "neighboring_relation",
        None,
        accounting.NEIGHBORING_RELATIONS,
        "What neighbouring data sets differ by; by default that of the sampling.",
        flag_values=values,
    )
    return values


def length_flags(values):
    """Adds the flags of one batch size and one length."""
    flags.DEFINE_integer("batch_size", None, "Expected examples in an update.", flag_values=values)
    flags.DEFINE_integer(
        "epochs", None, "Epochs of ceil(num_examples / batch_size) updates. Or:", flag_values=values
    )
    flags.DEFINE_integer("steps", None, "Updates.", flag_values=values)
    flags.DEFINE_integer(
        "capacity", None, "Examples to which a larger Poisson draw is cut.", flag_values=values
    )


def parse(values, argv, usage, required):
    """Reads the command line into flags, or ends the program with one message.

    Args:
      values: ``absl.flags.FlagValues``.
      argv: list of str, the name of the program first.
      usage: str, what the program does, printed for --help.
      required: list of str, names of the flags that have to be given.
    """
    if any(argument in ("-h", "-help", "--help") for argument in argv[1:]):
        print(f"{usage.strip()}\n\nFlags:\n{values.get_help()}")
        sys.exit(0)
    try:
        others = values(argv)[1:]
    except flags.Error as error:
        sys.exit(f"{_name(argv)}: {error}")
    if others:
        sys.exit(f"{_name(argv)}: unknown arguments: {' '.join(others)}. Flags begin with --.")
    missing = [f"--{name}" for name in required if values[name].value is None]
    if missing:
        sys.exit(f"{_name(argv)}: {', '.join(missing)} must be given. --help tells what they are.")


def run(argv, action):
    """Calls a function; what it finds wrong with its arguments ends the program as one message.

    Warnings are printed as lines of the program, without the place in the code.
    """
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            result = action()
        except ValueError as error:
            sys.exit(f"{_name(argv)}: {error}")
    for message in dict.fromkeys(str(warning.message) for warning in raised):
        print(f"{_name(argv)}: warning: {message}", file=sys.stderr)
    return result


def _name(argv):
    return argv[0].rsplit("/", 1)[-1]
