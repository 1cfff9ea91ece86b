"""Markdown tables of measurements."""

import math
import statistics

from benchmarks.cases import Case
from benchmarks.zoo import ZOO


def markdown(header, rows):
    """A Markdown table of lists of strings."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def geometric_mean(values):
    """exp of the mean of the logarithms."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def seconds(value):
    """A duration in ms, or in s where it is long."""
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def versions(found):
    """One line with what was measured, from the records."""
    records = [record for case in found for record in found[case]]
    names = sorted({record["versions"] for record in records if "versions" in record})
    return "; ".join(
        name for name in names if not any(name in more for more in set(names) - {name})
    )


def _sections(found):
    """{(backend, jit_compile, in microbatches): cases of keras_dp, in the order of the zoo}."""
    sections = {}
    for case in found:
        if case.library == "keras_dp":
            key = (case.mode, case.jit_compile, case.microbatch_size is not None)
            sections.setdefault(key, []).append(case)
    order = list(ZOO)
    return {
        key: sorted(cases, key=lambda case: (order.index(case.model), case.batch_size))
        for key, cases in sorted(sections.items(), key=lambda item: (item[0][2], *item[0]))
    }


def _title(backend, jit_compile, microbatches):
    batches = "large batches in microbatches" if microbatches else "one pass a batch"
    return f"backend {backend}, {'with' if jit_compile else 'no'} XLA, {batches}"


def ratios(found):
    """Step times relative to plain Keras.

    Returns:
      {title of a section: {model: ratio}} for every section and model that was measured; the
      model's name goes with the batch where that is not the zoo's.
    """
    values = {}
    for key, cases in _sections(found).items():
        for case in cases:
            private, plain = found.median(case), found.median(case.baseline)
            if private and plain:
                ratio = private["step_s"] / plain["step_s"]
                values.setdefault(_title(*key), {})[_label(case)] = ratio
    return values


def _label(case):
    entry = ZOO[case.model]
    if (case.batch_size, case.microbatch_size) in ((entry.batch_size, None), entry.large):
        return case.model
    return f"{case.model} {batch(case)}"


def batch(case):
    """The batch size, and the microbatch size if there is one."""
    micro = f" by {case.microbatch_size}" if case.microbatch_size else ""
    return f"{case.batch_size:,}{micro}"


def own(found):
    """One table a backend, with and without XLA and microbatches, and what sums it up."""
    parts = [f"{versions(found)}.\n"]
    for key, cases in _sections(found).items():
        header = "model|batch|plain step|private step|ratio|first step|peak memory".split("|")
        title = _title(*key)
        parts.append(f"**{title[0].upper()}{title[1:]}**\n")
        parts.append(markdown(header, [_row(found, case) for case in cases]))
        values = list(ratios(found).get(title, {}).values())
        if values:
            parts.append(
                f"Geometric mean of the step ratios: {geometric_mean(values):.2f}x; "
                f"worst {max(values):.2f}x.\n"
            )
    return "\n".join(parts)


def _row(found, case):
    private, plain = found.median(case), found.median(case.baseline)
    row = [
        case.model,
        batch(case),
        seconds(plain["step_s"]) if plain else found.error(case.baseline),
    ]
    if not private:
        return [*row, found.error(case), "", "", f"{_last_peak(found, case):.0f} MB"]
    row.append(seconds(private["step_s"]))
    first, peak = f"{private['first_step_s']:.1f} s", f"{private['peak_rss_mb']:.0f} MB"
    if not plain:
        return [*row, "", first, peak]
    ratio = {key: private[key] / plain[key] for key in plain}
    return [
        *row,
        f"{ratio['step_s']:.2f}x{_range(found, case)}",
        f"{first}, {ratio['first_step_s']:.1f}x",
        f"{peak}, {ratio['peak_rss_mb']:.2f}x",
    ]


def _range(found, case):
    """The lowest and the highest ratio of a private process to the plain one of its turn."""
    pairs = list(zip(found.times(case), found.times(case.baseline)))
    if len(pairs) < 2:
        return ""
    values = [private / plain for private, plain in pairs]
    return f" ({min(values):.2f} to {max(values):.2f})"


def _last_peak(found, case):
    records = found[case]
    return records[-1]["peak_rss_mb"] if records else 0


def compared(found, models):
    """keras_dp and the other libraries: a row a way of training, a column a model.

    A private step is set against the plain step of its own library, in "x", and against that of
    Keras.
    """
    batches = {model: ZOO[model].batch_size for model in models}
    batches |= {case.model: case.batch_size for case in found}
    header = ["library, mode", *(f"{model} {batches[model]}" for model in models)]
    ways = list(dict.fromkeys(_way(case) for case in found))
    by_way = {(_way(case), case.model): case for case in found}
    rows = [
        [way, *(_cell(found, by_way.get((way, model))) for model in models)]
        for way in sorted(ways, key=lambda way: not way.startswith("keras"))
    ]
    parts = [
        f"{versions(found)}.\n",
        "Step, ratio to the plain step of the same library, peak memory.\n",
        markdown(header, rows),
        _against_the_fastest(found, models),
    ]
    return "\n".join(parts)


def _way(case):
    micro = f", microbatch {case.microbatch_size}" if case.microbatch_size else ""
    return f"{case.library} {case.mode}{micro}{', XLA' if case.jit_compile else ''}"


def _cell(found, case):
    if case is None:
        return ""
    value, plain = found.median(case), found.median(case.baseline)
    if value is None:
        return found.error(case)
    parts = [seconds(value["step_s"]), f"{value['peak_rss_mb']:.0f} MB"]
    if plain and not case.is_plain:
        parts.insert(1, f"{value['step_s'] / plain['step_s']:.2f}x")
    return ", ".join(parts)


def fastest(found, model):
    """{library: (seconds, case)} of each library's fastest private way to train a model."""
    best = {}
    for case in found:
        value = found.median(case)
        if case.model == model and not case.is_plain and value:
            candidate = (value["step_s"], case)
            best[case.library] = min(best.get(case.library, candidate), candidate, key=_first)
    return best


def fastest_ratios(found, models):
    """{library: {model: step of its fastest private way, relative to plain Keras}}."""
    values = {}
    for model in models:
        for library, (time, case) in fastest(found, model).items():
            plain = found.median(Case(model, "keras", "plain", case.batch_size))
            if plain:
                values.setdefault(library, {})[model] = time / plain["step_s"]
    return values


def _times_ours(found, models):
    """{library: [its fastest private step over ours, for each model that it can train]}."""
    values = {}
    for model in models:
        best = {library: time for library, (time, _) in fastest(found, model).items()}
        own = best.pop("keras_dp", None)
        for library, time in best.items() if own else ():
            values.setdefault(library, []).append(time / own)
    return values


def _first(pair):
    return pair[0]


def _against_the_fastest(found, models):
    rows, factors = [], []
    for model in models:
        best = fastest(found, model)
        own = best.pop("keras_dp", None)
        if own and best:
            time, case = min(best.values(), key=_first)
            factors.append(time / own[0])
            rows.append([model, seconds(own[0]), seconds(time), _way(case), f"{factors[-1]:.2f}x"])
    if not rows:
        return ""
    header = "model|keras_dp|fastest other|which|keras_dp is faster by".split("|")
    mean = f"Geometric mean: {geometric_mean(factors):.2f}x; lowest {min(factors):.2f}x."
    each = [
        f"{library} {geometric_mean(values):.2f}x ({len(values)} models)"
        for library, values in _times_ours(found, models).items()
    ]
    mean += f" Against the fastest way of each by itself: {', '.join(each)}.\n"
    return f"{markdown(header, rows)}\n{mean}"
