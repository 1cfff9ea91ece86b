"""From measurements to tables, charts and pages; no measurement is made here."""

import json
import pathlib
import re

import pytest

from benchmarks import chart, memory, page, tables
from benchmarks.cases import Case, Results
from benchmarks.peers import run as peers
from benchmarks.run import groups

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLAIN = Case("mlp", "keras", "plain", 256)
PRIVATE = Case("mlp", "keras_dp", "auto", 256)


def record(step, first=1.0, peak=100.0):
    return {
        "step_s": step,
        "first_step_s": first,
        "peak_rss_mb": peak,
        "versions": "Keras 3 on TensorFlow 2",
    }


@pytest.fixture
def found(tmp_path):
    """mlp: 3x, measured three times; cnn: 1.5x, once; vit: over the limit; with XLA: 2x."""
    results = Results(tmp_path / "results.jsonl")
    for plain, private in ((0.010, 0.031), (0.011, 0.030), (0.010, 0.020)):
        results.add(PLAIN, record(plain))
        results.add(PRIVATE, record(private, 4.0, 150.0))
    cnn = Case("cnn", "keras_dp", "auto", 256)
    results.add(cnn.baseline, record(2.0))
    results.add(cnn, record(3.0))
    vit = Case("vit", "keras_dp", "auto", 64)
    results.add(vit.baseline, record(1.0))
    results.add(vit, {"error": "over the limit of 18 GB", "peak_rss_mb": 18500.0})
    xla = Case("mlp", "keras_dp", "auto", 256, jit_compile=True)
    results.add(xla.baseline, record(0.02))
    results.add(xla, record(0.04))
    return results


def rows(text, start):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| {start} ")
    ]


def test_own_table(found):
    text = tables.own(found)
    without_xla, with_xla = rows(text, "mlp")
    assert without_xla == [
        "mlp",
        "256",
        "10.0 ms",
        "30.0 ms",
        "3.00x (2.00 to 3.10)",
        "4.0 s, 4.0x",
        "150 MB, 1.50x",
    ]
    assert with_xla[2:5] == ["20.0 ms", "40.0 ms", "2.00x"]
    assert rows(text, "cnn")[0][2:5] == ["2.00 s", "3.00 s", "1.50x"]
    assert rows(text, "vit")[0][2:4] == ["1.00 s", "over the limit of 18 GB"]
    assert "Geometric mean of the step ratios: 2.12x; worst 3.00x." in text
    assert "Geometric mean of the step ratios: 2.00x; worst 2.00x." in text
    assert text.count("Keras 3 on TensorFlow 2") == 1


def test_the_file_gives_the_same_table(found):
    assert tables.own(Results(found.path)) == tables.own(found)


def test_other_batches_of_a_model_do_not_replace_one_another(found):
    small = Case("mlp", "keras_dp", "auto", 32)
    found.add(small.baseline, record(0.1))
    found.add(small, record(0.4))
    ratios = tables.ratios(found)["backend auto, no XLA, one pass a batch"]
    assert ratios["mlp 32"] == pytest.approx(4.0)
    assert ratios["mlp"] == pytest.approx(3.0)


def test_forgetting_some_cases_keeps_the_others(found):
    found.forget([PLAIN, PRIVATE, Case("lstm", "keras", "plain", 64)])
    for results in (found, Results(found.path)):
        assert results[PLAIN] == results[PRIVATE] == []
        assert len(list(results)) == 6
    assert len(found.path.read_text().splitlines()) == 6


def test_what_is_compared_with_what():
    micro = Case("mlp", "keras_dp", "loop", 4096, 256, True)
    assert micro.baseline == Case("mlp", "keras", "plain", 4096, None, True)
    flax = Case("mlp", "jax_privacy", "flax_private", 8, 1, True)
    assert flax.baseline == Case("mlp", "jax_privacy", "flax_plain", 8, None, True)
    assert flax.baseline.baseline == flax.baseline
    assert Case("mlp", "opacus", "ghost", 8).baseline == Case("mlp", "opacus", "plain", 8)


def test_groups_of_a_run():
    two, one = groups(["mlp"], ["auto", "loop"], ["false", "true"], None, None, False)
    assert [(c.library, c.mode, c.batch_size, c.jit_compile) for c in two] == [
        ("keras", "plain", 256, False),
        ("keras_dp", "auto", 256, False),
        ("keras_dp", "loop", 256, False),
    ]
    assert all(case.jit_compile for case in one)
    (large,) = groups(["text"], ["auto"], ["false"], None, None, True)
    assert [(c.batch_size, c.microbatch_size) for c in large] == [(1024, None), (1024, 64)]
    (chosen,) = groups(["text"], ["auto"], ["false"], 128, 32, False)
    assert [(c.batch_size, c.microbatch_size) for c in chosen] == [(128, None), (128, 32)]


def test_comparison_table(found):
    for mode, step in (("plain", 0.1), ("hooks", 0.3), ("ghost", 0.06)):
        found.add(Case("mlp", "opacus", mode, 256), record(step))
    found.add(Case("cnn", "opacus", "ghost", 256), {"error": "TypeError: x", "peak_rss_mb": 9.0})
    text = tables.compared(found, ["mlp", "cnn"])
    assert rows(text, "opacus hooks")[0] == ["opacus hooks", "300.0 ms, 3.00x, 100 MB", ""]
    assert rows(text, "opacus ghost")[0][2] == "TypeError: x"
    assert rows(text, "keras_dp auto")[0][1] == "30.0 ms, 3.00x, 150 MB"
    assert rows(text, "mlp") == [["mlp", "30.0 ms", "60.0 ms", "opacus ghost", "2.00x"]]
    assert "Geometric mean: 2.00x; lowest 2.00x. " in text
    assert "Against the fastest way of each by itself: opacus 2.00x (1 models)." in text
    ratios = tables.fastest_ratios(found, ["mlp", "cnn"])
    assert ratios["opacus"] == {"mlp": pytest.approx(6.0)}
    assert ratios["keras_dp"] == {"mlp": pytest.approx(3.0), "cnn": pytest.approx(1.5)}


def test_comparison_is_written(found):
    found.add(Case("mlp", "opacus", "ghost", 256), record(0.06))
    text = peers.write(found, None)
    assert (found.path.parent / "results.md").read_text() == text
    chart_text = (found.path.parent / "chart.svg").read_text()
    for label in ("opacus", "keras_dp", "mlp"):
        assert f"<!-- {label} -->" in chart_text


def test_memory_table(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    few, many = Case("cnn", "keras_dp", "auto", 256), Case("cnn", "keras_dp", "auto", 65_536, 256)
    data = 65_536 * (28 * 28 + 1) * 4 / 2**20
    assert memory.data_mb(many) == pytest.approx(data)
    results.add(few, record(0.1, peak=100 + data / 256))
    results.add(many, record(0.1, peak=150 + data))
    text = memory.table(results, many, few)
    assert "1.50x the memory" in text
    assert rows(text, "cnn")[1][1:] == ["65,536 by 256", f"{150 + data:.0f} MB", "196 MB", "150 MB"]
    failed = Results(tmp_path / "failed.jsonl")
    failed.add(many, {"error": "over the limit of 360 s", "peak_rss_mb": 1.0})
    assert "over the limit of 360 s" in memory.table(failed, many, few)


def test_chart_names_what_it_shows(found, tmp_path):
    series = tables.ratios(found)
    assert [list(values) for values in series.values()] == [["mlp", "cnn"], ["mlp"]]
    for number in range(2):
        chart.bars(series, tmp_path / f"{number}.svg", "step ratio", "Costs")
    text = (tmp_path / "0.svg").read_text()
    for label in ("step ratio", "Costs", "model", "mlp", "cnn", "3.00", *series):
        assert f"<!-- {label} -->" in text
    assert text == (tmp_path / "1.svg").read_text()  # no needless change in the repository


def test_page_block_and_picture(found, tmp_path):
    path = tmp_path / "page.md"
    start, end = "<!-- benchmarks: zoo -->", "<!-- end of benchmarks: zoo -->"
    path.write_text(f"before\n\n{start}\nold\n{end}\n\nafter\n")
    page.publish("text", tables.ratios(found), "ratio", "Costs", tmp_path, path, "zoo")
    assert path.read_text() == (
        f"before\n\n{start}\n\n![Costs](page-zoo.svg)\n\ntext\n\n{end}\n\nafter\n"
    )
    assert (tmp_path / "page-zoo.svg").read_text() == (tmp_path / "chart.svg").read_text()
    assert (tmp_path / "results.md").read_text() == "text"
    for wrong in ("", f"{end}{start}", f"{start}{start}{end}"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="must have one <!-- benchmarks: zoo -->"):
            page.replace_block(path, "zoo", "text")


def test_the_page_has_every_block(tmp_path):
    copy = tmp_path / "performance.md"
    copy.write_text((ROOT / "docs" / "performance.md").read_text())
    for name in ("zoo", "peers", "memory", "roofline"):
        page.replace_block(copy, name, f"new {name}")
    assert re.findall(r"^new (\w+)$", copy.read_text(), re.M) == [
        "zoo",
        "peers",
        "memory",
        "roofline",
    ]


def test_every_mode_of_the_peers_has_its_baseline():
    for group in peers.groups(["mlp", "vit"], peers.LIBRARIES, None):
        assert {case.baseline for case in group} <= set(group)
        assert len(set(group)) == len(group) == len(peers.WAYS)
        assert len({case.name for case in group}) == len(group)


def test_lines_are_json_with_the_case(found):
    for line in found.path.read_text().splitlines():
        assert {"model", "library", "mode", "batch_size", "peak_rss_mb"} <= set(json.loads(line))
