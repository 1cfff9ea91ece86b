"""Compiles private steps for TPU topologies, on a machine without a TPU, and says what came out.

    python -m benchmarks.tpu.run --install_only     # make the environment
    python -m benchmarks.tpu.run --models=cnn --optimizers=DPSGD --topologies=v5e:2x4
    python -m benchmarks.tpu.run --cost             # what docs/scale.md calculates with
    python -m benchmarks.tpu.run --table_only --page=docs/scale.md

Every program is compiled in a process of its own, in an environment of its own under .venvs/, which
is made if it is missing. Records are appended to ``results.jsonl`` in ``--output_dir``; what
the file has already is not compiled again. Ends with an error when a program does what it should
not, or a control was not refused.
"""

import pathlib
import sys

from absl import app, flags

from benchmarks import limits, page
from benchmarks.peers import environments
from benchmarks.runner import require_among
from benchmarks.tpu import cases, report
from benchmarks.zoo import OWN

FLAGS = flags.FLAGS
REQUIREMENTS = pathlib.Path(__file__).parent / "requirements.txt"


def interpreter(python):
    """The interpreter of the environment, which is made if it is missing or out of date.

    Args:
      python: the Python 3.11 to make it with.
    """
    return environments.interpreter("tpu", python, requirements=REQUIREMENTS)


def compile_case(case, python, folder, seconds=1800, gigabytes=18):
    """Compiles one case in a process of its own.

    Args:
      case: :class:`~benchmarks.tpu.cases.Case`.
      python: interpreter of the environment.
      folder: of the log.
      seconds, gigabytes: beyond which the process is ended.

    Returns:
      What ``benchmarks.tpu.compile`` printed; or a dict with ``error``, when it printed nothing.
    """
    return limits.run(
        [str(python), "-m", "benchmarks.tpu.compile", *case.flags],
        seconds=seconds,
        gigabytes=gigabytes,
        log=folder / "logs" / f"{case.name}.log",
    )


def main(argv):
    """Compiles what the flags name and is not there yet, and makes the tables."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    folder = pathlib.Path(FLAGS.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if FLAGS.install_only:
        interpreter(FLAGS.python)
        return
    found = cases.Results(folder / "results.jsonl")
    if not FLAGS.table_only:
        python = interpreter(FLAGS.python)
        wanted = cases.plan(FLAGS.models, FLAGS.optimizers, FLAGS.topologies)
        wanted = cases.cost_plan() if FLAGS.cost else wanted
        missing = [case for case in wanted if case not in found]
        for number, case in enumerate(missing):
            record = compile_case(case, python, folder, FLAGS.time_limit_s, FLAGS.memory_limit_gb)
            found.add(case, record)
            said = report.verdict(case, record)
            print(
                f"{number + 1}/{len(missing)} {case.name}: {said or 'as it should be'}", flush=True
            )
    text = report.tables_of(found)
    (folder / "results.md").write_text(text)
    if FLAGS.page:
        page.replace_block(pathlib.Path(FLAGS.page), "tpu", text)
    print(text)
    wrong = [case.name for case in found if report.verdict(case, found.get(case))]
    if wrong:
        sys.exit(f"Not as it should be: {', '.join(wrong)}")


if __name__ == "__main__":
    flags.DEFINE_list("models", list(OWN), "models of benchmarks/zoo.py")
    flags.DEFINE_list("optimizers", list(cases.OPTIMIZERS), "private optimizers")
    flags.DEFINE_list("topologies", list(cases.TOPOLOGIES), "topologies of libtpu")
    flags.DEFINE_bool("cost", False, "compile what the cost page needs instead")
    flags.DEFINE_string("python", "python3.11", "the Python 3.11 that makes the environment")
    flags.DEFINE_bool("install_only", False, "make the environment and compile nothing")
    flags.DEFINE_bool("table_only", False, "compile nothing; make the tables of what there is")
    flags.DEFINE_float("time_limit_s", 1800, "seconds after which a process is ended")
    flags.DEFINE_float("memory_limit_gb", 18, "GiB beyond which a process is ended")
    flags.DEFINE_string("output_dir", "output/tpu", "folder of the results")
    flags.DEFINE_string("page", None, "Markdown file whose block 'tpu' gets the tables")
    for flag, allowed in (
        ("models", OWN),
        ("optimizers", cases.OPTIMIZERS),
        ("topologies", cases.TOPOLOGIES),
    ):
        require_among(flag, allowed)
    app.run(main)
