"""Times the steps of one process, and prints what was measured as a line of JSON.

No framework is imported here: the programs that measure other libraries use it too.
"""

import json
import os
import resource
import statistics
import sys
import time
import traceback

from absl import flags

from benchmarks.zoo import ZOO

L2_NORM_CLIP = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01

WARM_UP = 3

FLAGS = flags.FLAGS


def define_flags(modes):
    """Defines the flags that every measuring program has."""
    flags.DEFINE_enum("model", None, list(ZOO), "model of benchmarks/zoo.py", required=True)
    flags.DEFINE_enum("mode", modes[0], modes, "way of training")
    flags.DEFINE_integer("batch_size", 0, "examples of a step; 0: the model's own", 0)
    flags.DEFINE_integer("microbatch_size", None, "examples of a pass; none: all of them", 1)
    flags.DEFINE_bool("jit_compile", False, "compile the step with XLA")
    flags.DEFINE_integer("steps", 12, f"steps; the first {WARM_UP} are left out of the median", 1)
    flags.DEFINE_float("max_seconds", 60, "after so long, the steps there are have to do")


class EnoughSteps(Exception):
    """Ends a training loop that has no end of its own."""


class StepClock:
    """The wall time of every step.

    Args:
      steps: how many to time, with the first WARM_UP of them.
      max_seconds: steps after the first stop once they took this long and there is one.
    """

    def __init__(self, steps, max_seconds):
        self.steps, self.max_seconds = steps, max_seconds
        self.seconds = []

    def begin(self):
        """A step begins."""
        self._start = time.perf_counter()

    def end(self):
        """Its result is there."""
        self.seconds.append(time.perf_counter() - self._start)

    @property
    def done(self):
        """Whether there are enough steps."""
        later = self.seconds[1:]
        slow = bool(later) and sum(later) > self.max_seconds
        return slow or len(self.seconds) >= self.steps

    def run(self, step):
        """Calls ``step()``, which must wait for its own result, until there are enough."""
        while not self.done:
            self.begin()
            step()
            self.end()

    @property
    def timed(self):
        """The steps that count: those after the first three, or the last if there are no more."""
        return self.seconds[min(WARM_UP, len(self.seconds) - 1) :]


def report(measure):
    """Measures what the flags say and prints it.

    Args:
      measure: function of ``(entry, batch_size, clock)`` that trains with ``clock`` and returns
        the number of trained parameters and the versions of what it ran on.

    An exception is printed as an error of that line: it is a result, of a library that
    cannot train the model.
    """
    entry = ZOO[FLAGS.model]
    clock = StepClock(FLAGS.steps, FLAGS.max_seconds)
    record = {"load": round(os.getloadavg()[0], 2)}
    try:
        parameters, versions = measure(entry, FLAGS.batch_size or entry.batch_size, clock)
        if parameters != entry.parameters:
            raise ValueError(
                f"this model has {parameters} parameters, that of benchmarks/zoo.py "
                f"{entry.parameters}: they are not the same model."
            )
        record |= {
            "step_s": statistics.median(clock.timed),
            "first_step_s": clock.seconds[0],
            "timed_steps": len(clock.timed),
            "parameters": parameters,
            "versions": versions,
        }
    except Exception as error:
        traceback.print_exc()
        record["error"] = f"{type(error).__name__}: {_first_line(error)}"
    record["peak_rss_mb"] = peak_rss_mb()
    print(json.dumps(record), flush=True)


def forget_peak():
    """Lets :func:`peak_rss_mb` begin anew, from what is resident now (Linux: proc(5))."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_rss_mb():
    """The largest resident set of this process so far, in units of 2^20 bytes."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _first_line(error):
    """What went wrong, without the code frames that TensorFlow puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0] == "in user code:":
        lines = lines[-1:]
    return lines[0].removeprefix(f"{type(error).__name__}: ")[:300] if lines else ""
