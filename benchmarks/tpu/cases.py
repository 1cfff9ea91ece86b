"""What is compiled, and the file of what came out.

The full product of models, optimizers and topologies would take days. So each varies while the
others stand still: the optimizers and the topologies on one small model, the models with one
optimizer; all for 8 replicas and for 256.
"""

import dataclasses
import json

from benchmarks.zoo import OWN

TOPOLOGIES = ("v5e:2x4", "v5e:16x16", "v4:2x2x1", "v5p:2x2x1", "v6e:2x4")
OPTIMIZERS = ("DPSGD", "DPMomentum", "DPAdam", "DPAdamW", "DPLamb")
CONTROLS = ("python_in_the_loss", "another_number_of_replicas", "too_large")
SMALL, POD = TOPOLOGIES[:2]
MODEL, OPTIMIZER = "cnn", "DPAdam"

# Of the cost page: rows of a replica.
COSTED = {"resnet50": 16, "vit_l_1": 16, "vit_l_2": 16}
# Where the operations of a normal are counted: with noise and without.
NOISY = "mlp"


@dataclasses.dataclass(frozen=True)
class Case:
    """One program for one topology.

    Attributes:
      model: name in ``program.ENTRIES``.
      optimizer: name in OPTIMIZERS.
      topology: of libtpu.
      private: False for the Keras optimizer beneath.
      batch_size: rows of a replica; None for the model's own.
      policy: Keras's dtype policy.
      noise_multiplier: of the private step.
      replicas: None for all devices of the topology.
      tensor_float_32: whether products of float32 may be rounded, as is TensorFlow's default.
      control: None, or the program of ``controls`` that takes the model's place.
    """

    model: str = MODEL
    optimizer: str = OPTIMIZER
    topology: str = SMALL
    private: bool = True
    batch_size: int | None = None
    policy: str = "float32"
    noise_multiplier: float = 1.0
    replicas: int | None = None
    tensor_float_32: bool = True
    control: str | None = None

    @property
    def flags(self):
        """The case as flags of ``benchmarks.tpu.compile``."""
        values = dataclasses.asdict(self)
        return [f"--{name}={value}" for name, value in values.items() if value is not None]

    @property
    def name(self):
        """Words without spaces, the name of the log."""
        words = [self.control or self.model, self.optimizer, self.topology.replace(":", "-")]
        words += [] if self.private else ["plain"]
        words += [f"{self.batch_size}rows"] if self.batch_size else []
        words += [self.policy] if self.policy != "float32" else []
        words += [] if self.tensor_float_32 else ["exact"]
        words += ["quiet"] if self.noise_multiplier == 0 else []
        return "-".join(words)


class Results:
    """The records of a file with a line of JSON a case; the last one of a case counts."""

    def __init__(self, path):
        self._path, self._records = path, {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            entry = json.loads(line)
            self._records[Case(**entry["case"])] = entry["record"]

    def add(self, case, record):
        """Appends what came of a case."""
        self._records[case] = record
        with self._path.open("a") as file:
            file.write(json.dumps({"case": dataclasses.asdict(case), "record": record}) + "\n")

    def __iter__(self):
        return iter(self._records)

    def __contains__(self, case):
        return case in self._records

    def get(self, case):
        """The record of a case, or None."""
        return self._records.get(case)


def plan(models=OWN, optimizers=OPTIMIZERS, topologies=TOPOLOGIES, controls=CONTROLS):
    """The cases of the tables, the cheap ones first.

    The first topology is the one on which the plain step is compiled too.
    """
    cases = [Case(control=control, optimizer="DPSGD") for control in controls]
    cases += [Case(optimizer=optimizer) for optimizer in optimizers]
    cases += [Case(topology=topology) for topology in topologies]
    cases += [Case(optimizer=optimizer, topology=POD) for optimizer in optimizers]
    cases.append(Case(tensor_float_32=False))
    for model in models:
        same = Case(model)
        cases += [same, dataclasses.replace(same, private=False)]
        cases += [dataclasses.replace(same, topology=POD)]
    wanted = {POD, *topologies}
    return [case for case in dict.fromkeys(cases) if case.topology in wanted]


def cost_plan(models=tuple(COSTED)):
    """The cases that the cost page's numbers come from, of one replica.

    What noise costs a weight is the same in every model, and takes the compiler long: it is
    counted in one of them, and the others have none.
    """
    alone = Case(NOISY, "DPLamb", policy="mixed_bfloat16", replicas=1)
    quiet = dataclasses.replace(alone, noise_multiplier=0.0)
    cases = [alone, quiet]
    for model in models:
        same = dataclasses.replace(quiet, model=model, batch_size=COSTED[model])
        cases += [same, dataclasses.replace(same, private=False)]
    return cases
