"""What a compiled program must and must not hold, and the tables of it."""

import dataclasses

from benchmarks import tables
from benchmarks.tpu import cases
from benchmarks.zoo import ZOO

# What each control's refusal has to say, so that it was not refused for something else.
REFUSALS = {
    "python_in_the_loss": "PyFunc",
    "another_number_of_replicas": "replica groups",
    "too_large": "RESOURCE_EXHAUSTED",
}


def verdict(case, record):
    """What is wrong with a record; empty when nothing is.

    A private program sums its gradients over the replicas, all of them and nothing else, in one
    operation; calls no host; and draws its noise by Philox. A plain one, which Keras made, is
    there to be compared with and may do what it likes. A control has to be refused.
    """
    if "error" in record:
        return record["error"]
    if case.control:
        return _refusal(case.control, record)
    if "refused" in record:
        return record["refused"]
    if not case.private:
        return ""
    wrong = []
    alone = record["replicas"] == 1
    if alone and record["collectives"]:
        wrong.append(f"one replica sends {record['collectives']}")
    if not alone and record["collectives"] != {"all-reduce": 1}:
        wrong.append(f"collectives {record['collectives']}")
    if not alone and record["summed_elements"] != record["parameters"]:
        wrong.append(f"sums {record['summed_elements']} numbers of {record['parameters']} weights")
    if record["host_calls"]:
        wrong.append(f"calls its host: {record['host_calls']}")
    drawn = ["philox"] if case.noise_multiplier else []
    if record["generators"] != drawn:
        wrong.append(f"random bits by {record['generators']}, not {drawn}")
    return "; ".join(wrong)


def _refusal(control, record):
    refused = record.get("refused")
    if refused is None:
        return "was compiled, and should not"
    expected = REFUSALS[control]
    return "" if expected in refused else f"refused, but not for {expected}: {refused[:200]}"


HEADER = (
    "model, rows a replica",
    "optimizer",
    "topology",
    "replicas, hosts",
    "sent",
    "weights summed",
    "random bits",
    "precision of products",
    "host calls",
    "memory a core",
    "of it temporary",
    "plain's",
    "compiled in",
)


def tables_of(found):
    """Markdown tables of all that was compiled.

    Args:
      found: :class:`~benchmarks.tpu.cases.Results`.
    """
    programs = [case for case in found if not case.control and case.private and not _of_cost(case)]
    programs.sort(key=lambda case: (case.topology, case.model, case.optimizer))
    parts = [tables.markdown(HEADER, [_row(found, case) for case in programs])]
    controls = [
        [case.control, _said(found.get(case), REFUSALS[case.control])]
        for case in found
        if case.control
    ]
    if controls:
        header = ["must be refused", "what the compiler said"]
        parts.append(tables.markdown(header, controls))
    costs = [_cost_row(case, found.get(case)) for case in cases.cost_plan() if case in found]
    if costs:
        parts.append(tables.markdown(COST_HEADER, costs))
    return "\n".join(parts)


def _of_cost(case):
    return case.replicas == 1 and not case.control


def _row(found, case):
    record = found.get(case)
    rows = case.batch_size or ZOO[case.model].batch_size
    start = [f"{case.model}, {rows}", case.optimizer, case.topology]
    if "parameters" not in record:
        return [*start, record.get("error") or _said(record), *[""] * (len(HEADER) - 4)]
    plain = found.get(dataclasses.replace(case, private=False)) or {}
    sent = ", ".join(f"{count} {name}" for name, count in record["collectives"].items())
    share = f"{record['summed_elements']:,} of {record['parameters']:,}"
    return [
        *start,
        f"{record['replicas']}, {record['hosts']}",
        f"{sent}, {_megabytes(record['sent_bytes'])}",
        share,
        ", ".join(record["generators"]),
        ", ".join(f"{number} {name}" for name, number in record["precisions"].items()),
        ", ".join(record["host_calls"]) or "none",
        _megabytes(memory(record)),
        _megabytes(record["temporary_bytes"]),
        f"{_megabytes(memory(plain))}, {_megabytes(plain['temporary_bytes'])}" if plain else "",
        f"{record['lower_s'] + record['compile_s']:.0f} s",
    ]


def memory(record):
    """Bytes of a core: arguments, and what the program needs while it runs.

    The new values of variables take the place of the old ones, as they do under TPUStrategy.
    """
    return record["arguments_bytes"] + record["temporary_bytes"] + record["code_bytes"]


COST_HEADER = (
    "model",
    "rows",
    "step",
    "operations",
    "bytes moved",
    "memory a core",
    "compiled in",
)


def _cost_row(case, record):
    step = "private" if case.private else "plain"
    step += "" if case.noise_multiplier else ", no noise"
    if "parameters" not in record:
        rest = [record.get("error") or _said(record), "", "", ""]
    else:
        rest = [
            f"{record['flops']:.3g}",
            f"{record['bytes_accessed']:.3g}",
            _megabytes(memory(record)),
            f"{record['lower_s'] + record['compile_s']:.0f} s",
        ]
    rows = case.batch_size or ZOO[case.model].batch_size
    return [case.model, str(rows), step, *rest]


def _said(record, about=""):
    """The words of a refusal, or those before and behind ``about``."""
    said = (record.get("refused") or record.get("error", "")).replace("|", "/").replace("\n", " ")
    start = max(said.find(about) - 40, 0)
    return ("..." if start else "") + said[start : start + 140]


def _megabytes(count):
    return f"{count / 1e6:,.1f} MB"
