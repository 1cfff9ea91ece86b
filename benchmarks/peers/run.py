"""Compares keras_dp with other libraries for private training, on the same models.

    python -m benchmarks.peers.run --install_only      # make the environments
    python -m benchmarks.peers.run --models=mlp,cnn --libraries=keras,keras_dp,opacus
    python -m benchmarks.peers.run --table_only        # the tables of what was measured before

Each library runs in a virtual environment of its own under .venvs/, which is made if it is missing.
Every measurement is a process of its own, and all ways to train one model take turns. Each
library also trains without privacy: that is its own baseline. Measurements are appended to
``results.jsonl`` in ``--output_dir``; the tables (``results.md``) and the chart (``chart.svg``)
are made of all that the file holds.
"""

import functools
import sys

from absl import app, flags

from benchmarks import page, runner, tables
from benchmarks.cases import Case
from benchmarks.peers import environments
from benchmarks.run import machine
from benchmarks.zoo import COMPARED, ZOO

FLAGS = flags.FLAGS

# (library, mode, jit_compile, microbatch_size)
WAYS = (
    ("keras", "plain", False, None),
    ("keras", "plain", True, None),
    ("keras_dp", "auto", False, None),
    ("keras_dp", "auto", True, None),
    ("opacus", "plain", False, None),
    ("opacus", "hooks", False, None),
    ("opacus", "functorch", False, None),
    ("opacus", "ghost", False, None),
    ("jax_privacy", "keras_plain", True, None),
    ("jax_privacy", "keras_private", True, None),
    ("jax_privacy", "flax_plain", True, None),
    ("jax_privacy", "flax_private", True, None),
    ("jax_privacy", "flax_private", True, 1),
    ("tensorflow_privacy", "plain", False, None),
    ("tensorflow_privacy", "plain", True, None),
    ("tensorflow_privacy", "vectorized", False, None),
    ("tensorflow_privacy", "dpmodel", False, None),
    ("tensorflow_privacy", "dpmodel", True, None),
    ("tensorflow_privacy", "fast", False, None),
)
LIBRARIES = tuple(dict.fromkeys(library for library, *_ in WAYS))


def _define_flags():
    runner.define_flags("output/peers")
    flags.DEFINE_list("models", list(COMPARED), "models of benchmarks/zoo.py")
    flags.DEFINE_list("libraries", list(LIBRARIES), "libraries, keras being the one without")
    flags.DEFINE_integer("batch_size", None, "examples of a step; none: the model's own", 1)
    flags.DEFINE_string("python", "python3.11", "the Python 3.11 that makes environments")
    flags.DEFINE_bool("install_only", False, "make the environments and measure nothing")
    for flag, allowed in (("models", COMPARED), ("libraries", LIBRARIES)):
        runner.require_among(flag, allowed)


def groups(models, libraries, batch_size):
    """The cases that the flags name, a list a model."""
    return [
        [
            Case(model, library, mode, batch_size or ZOO[model].batch_size, micro, jit)
            for library, mode, jit, micro in WAYS
            if library in libraries
        ]
        for model in models
    ]


@functools.cache
def _interpreter(library):
    if library not in environments.LIBRARIES:
        return sys.executable
    return str(environments.interpreter(library, FLAGS.python))


def command(case):
    """The program that measures a case."""
    own = case.library in ("keras", "keras_dp")
    module = "benchmarks.measure" if own else f"benchmarks.peers.measure_{case.library}"
    return [_interpreter(case.library), "-m", module]


def write(found, page_path):
    """Writes the tables and the chart of all that was measured.

    Args:
      found: :class:`~benchmarks.cases.Results`.
      page_path: None, or a Markdown file whose block "peers" is replaced; the chart goes beside it.

    Returns:
      The tables.
    """
    models = [model for model in ZOO if any(case.model == model for case in found)]
    text = f"{machine()}; {tables.compared(found, models)}"
    series = tables.fastest_ratios(found, models)
    label, title = "fastest private step / plain Keras step", "The fastest way of each library"
    page.publish(text, series, label, title, found.path.parent, page_path, "peers")
    return text


def main(argv):
    """Makes the environments, measures what the flags name, and makes the tables."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    found = runner.results()
    if not FLAGS.table_only:
        for library in FLAGS.libraries:
            _interpreter(library)  # an installation must not run beside a measurement
        if FLAGS.install_only:
            return
        wanted = groups(FLAGS.models, FLAGS.libraries, FLAGS.batch_size)
        runner.measure(found, wanted, command)
    print(write(found, FLAGS.page))


if __name__ == "__main__":
    _define_flags()
    app.run(main)
