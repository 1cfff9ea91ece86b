"""What can be measured, and the file of measurements.

A measurement is a line of JSON: the case, and ``step_s``, ``first_step_s``, ``peak_rss_mb`` or an
``error``. Lines are appended as they come, so that a run which was cut short can go on.
"""

import collections
import dataclasses
import json
import statistics

# The plain mode that a private mode is compared with; "plain" unless it is listed.
_BASELINES = {"keras_private": "keras_plain", "flax_private": "flax_plain"}
_MEDIANS = ("step_s", "first_step_s", "peak_rss_mb")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of training one model.

    Attributes:
      model: name in ``benchmarks.zoo.ZOO``.
      library: ``"keras"``, ``"keras_dp"`` or the name of another library.
      mode: ``"plain"``, a backend of keras_dp, or a way of the other library.
      batch_size: examples of a step.
      microbatch_size: examples of a pass inside the step; None for all of them.
      jit_compile: whether XLA compiles the step. Always, for JAX.
    """

    model: str
    library: str
    mode: str
    batch_size: int
    microbatch_size: int | None = None
    jit_compile: bool = False

    @property
    def baseline(self):
        """The case without privacy that this one is compared with."""
        library = "keras" if self.library == "keras_dp" else self.library
        mode = _BASELINES.get(self.mode, self.mode if self.is_plain else "plain")
        return dataclasses.replace(self, library=library, mode=mode, microbatch_size=None)

    @property
    def is_plain(self):
        """Whether it trains without privacy."""
        return self.mode.endswith("plain")

    @property
    def name(self):
        """A short name, also of the log file."""
        micro = f"-micro{self.microbatch_size}" if self.microbatch_size else ""
        xla = "-xla" if self.jit_compile else ""
        return f"{self.model}-{self.library}-{self.mode}-{self.batch_size}{micro}{xla}"

    @property
    def flags(self):
        """The case as flags of the program that measures it."""
        flags = [
            f"--model={self.model}",
            f"--mode={self.mode}",
            f"--batch_size={self.batch_size}",
            f"--jit_compile={str(self.jit_compile).lower()}",
        ]
        return flags + [f"--microbatch_size={self.microbatch_size}"] * bool(self.microbatch_size)


class Results:
    """The measurements in a file, by case, in the order in which they were made.

    Args:
      path: file of JSON lines; need not exist.
    """

    def __init__(self, path):
        self.path = path
        self._records = collections.defaultdict(list)
        lines = path.read_text().splitlines() if path.exists() else []
        names = [field.name for field in dataclasses.fields(Case)]
        for line in lines:
            record = json.loads(line)
            self._records[Case(**{name: record[name] for name in names})].append(record)

    def __iter__(self):
        return iter(self._records)

    def __getitem__(self, case):
        """The records of a case; an empty list when there are none."""
        return self._records.get(case, [])

    def add(self, case, record):
        """Appends a record to the file."""
        record = dataclasses.asdict(case) | record
        self._records[case].append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def forget(self, cases):
        """Drops the records of some cases, from the file too."""
        dropped = [self._records.pop(case, None) for case in cases]
        if any(dropped):
            records = [record for own in self._records.values() for record in own]
            self.path.write_text("".join(json.dumps(record) + "\n" for record in records))

    def times(self, case):
        """Seconds a step, of each repeat that has one."""
        return [record["step_s"] for record in self[case] if "step_s" in record]

    def median(self, case):
        """The medians over the repeats; None when no repeat was measured."""
        measured = [record for record in self[case] if "step_s" in record]
        if not measured:
            return None
        return {key: statistics.median(record[key] for record in measured) for key in _MEDIANS}

    def error(self, case):
        """Why a case has no measurement."""
        errors = [record["error"] for record in self[case] if "error" in record]
        return errors[-1] if errors else "not measured"
