"""What the programs that start many measurements share: flags, order, and the file they fill."""

import pathlib

from absl import flags

from benchmarks import limits
from benchmarks.cases import Results
from benchmarks.clock import WARM_UP

FLAGS = flags.FLAGS


def define_flags(output_dir):
    """Defines the flags that all of these programs have."""
    flags.DEFINE_integer("repeats", 3, "processes of each kind", 1)
    flags.DEFINE_integer("steps", 12, f"steps a process; the first {WARM_UP} are left out", 1)
    flags.DEFINE_float("time_limit_s", 360, "seconds after which a process is ended")
    flags.DEFINE_float("memory_limit_gb", 18, "GiB beyond which a process is ended")
    flags.DEFINE_bool("resume", False, "keep what is measured already and add what is missing")
    flags.DEFINE_bool("table_only", False, "measure nothing; make the tables of what there is")
    flags.DEFINE_string("output_dir", output_dir, "folder of the results")
    flags.DEFINE_string("page", None, "Markdown file whose marked block gets the tables too")


def require_among(flag, allowed):
    """Lets a flag that is a list hold only some values."""
    flags.register_validator(
        flag, lambda values: set(values) <= set(allowed), f"must be among {', '.join(allowed)}"
    )


def results():
    """The file of measurements in ``--output_dir``."""
    folder = pathlib.Path(FLAGS.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return Results(folder / "results.jsonl")


def measure(found, groups, command):
    """Fills ``found``, group by group, the cases of a group taking turns: A B A B.

    Machines are shared and noisy; what is compared is measured close together. A case that
    ends in an error is not tried again.

    Args:
      found: :class:`~benchmarks.cases.Results`.
      groups: lists of cases.
      command: function from a case to the program that measures it and its first arguments.
    """
    if not FLAGS.resume:
        found.forget([case for group in groups for case in group])
    for group in groups:
        for repeat in range(FLAGS.repeats):
            for case in group:
                records = found[case]
                if len(records) > repeat or any("error" in record for record in records):
                    continue
                log = found.path.parent / "logs" / f"{case.name}.log"
                record = limits.run(
                    [*command(case), *case.flags, f"--steps={FLAGS.steps}"],
                    seconds=FLAGS.time_limit_s,
                    gigabytes=FLAGS.memory_limit_gb,
                    log=log,
                )
                found.add(case, record)
                result = record.get("error") or f"{1e3 * record['step_s']:.1f} ms"
                print(f"{case.name}: {result}, {record['peak_rss_mb']:.0f} MB", flush=True)
