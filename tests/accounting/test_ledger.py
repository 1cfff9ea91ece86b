"""The ledger by itself: what it holds, composes, keeps on disk and refuses."""

import json
import multiprocessing
import os
import weakref

import hypothesis
import pytest
from hypothesis import strategies as st

import keras_dp
from keras_dp.accounting import Phase, epsilon_of_phases, ledger, ledger_file
from keras_dp.errors import LedgerError

N, DELTA = 1000, 1e-5
POISSON = Phase(num_examples=N, batch_size=50, noise_multiplier=1.5, steps=200)
SHUFFLE = Phase(num_examples=N, batch_size=100, noise_multiplier=4.0, sampling="shuffle", steps=25)
PHASES = st.builds(
    Phase,
    num_examples=st.just(N),
    batch_size=st.sampled_from([10, 30]),
    noise_multiplier=st.sampled_from([0.1 + 0.2, 2.0]),
    sampling=st.just("shuffle"),
    steps=st.integers(0, 300),
    epochs_begun=st.integers(0, 40),
    participations_per_update=st.sampled_from([1, 2]),
) | st.builds(
    Phase,
    num_examples=st.sampled_from([N, 500]),
    batch_size=st.just(50),
    noise_multiplier=st.floats(0.5, 5),
    steps=st.integers(0, 10**6),
)


@pytest.fixture(name="path")
def _path(tmp_path):
    return tmp_path / "ledger.json"


@pytest.fixture(name="new_process")
def _new_process(monkeypatch):
    """From here on, ledgers know nothing but what is on disk."""
    return lambda: monkeypatch.setattr(ledger, "_books", weakref.WeakValueDictionary())


def opened(path=None, **kwargs):
    return keras_dp.PrivacyLedger(path, **({"num_examples": N} | kwargs))


def test_an_empty_ledger(path):
    book = opened(path)
    assert (book.phases, book.entries, book.steps, book.epsilon(DELTA)) == ([], (), 0, 0.0)
    assert "nothing was released" in book.statement(DELTA)
    assert not path.exists()


def test_phases_compose():
    book = opened()
    for phase in (POISSON, SHUFFLE, POISSON):
        book.record(phase)
    assert [p.steps for p in book.phases] == [400, 25] and book.steps == 425
    for accountant in ("rdp", "pld"):
        expected = epsilon_of_phases([POISSON, POISSON, SHUFFLE], DELTA, accountant)
        assert book.epsilon(DELTA, accountant) == pytest.approx(expected, rel=1e-9)
    assert book.epsilon(DELTA) > max(epsilon_of_phases([p], DELTA) for p in (POISSON, SHUFFLE))
    assert "phase 2 of 2" in book.statement(DELTA)
    assert book.report(DELTA)["statement"] == book.statement(DELTA)
    json.dumps(book.report(DELTA))


@hypothesis.given(st.lists(PHASES, max_size=6))
@hypothesis.settings(max_examples=40, deadline=None)
def test_joining_equal_phases_changes_no_epsilon(phases):
    merged = ledger.merged_phases(phases)
    expected = epsilon_of_phases(phases, DELTA)
    assert epsilon_of_phases(merged, DELTA) == pytest.approx(expected, rel=1e-9)
    assert sum(p.steps for p in merged) == sum(p.steps for p in phases)


@hypothesis.given(st.lists(PHASES, max_size=6), st.text(min_size=1))
@hypothesis.settings(max_examples=40, deadline=None)
def test_text_there_and_back(phases, name):
    book = opened(name=name)
    for phase in phases:
        book.record(phase)
    copy = keras_dp.PrivacyLedger.from_json(book.to_json())
    assert copy.entries == book.entries and copy.name == name and copy.num_examples == N
    assert copy.epsilon(DELTA) == book.epsilon(DELTA)
    assert copy.to_json() == book.to_json()


def test_the_file_is_what_a_new_process_starts_from(path, new_process):
    opened(path, name="ward 7").record(POISSON)
    opened(path).record(SHUFFLE)
    new_process()
    book = keras_dp.PrivacyLedger(path)
    assert (book.name, book.num_examples, book.steps) == ("ward 7", N, 225)
    assert "ward 7" in repr(book) and "225 updates in 2 entries" in repr(book)
    assert sorted(os.listdir(path.parent)) == ["ledger.json", "ledger.json.lock"]


def test_a_folder_stands_for_a_file_in_it(tmp_path):
    book = opened(tmp_path)
    book.record(POISSON)
    assert book.path == (tmp_path / "privacy_ledger.json").resolve() and book.path.exists()


def test_two_ledgers_of_one_file_are_one(path):
    first, second = opened(path), opened(str(path))
    first.record(POISSON)
    second.record(POISSON)
    assert first.entries == second.entries and first.steps == 400


def damaged(text):
    """What may happen to a file, each with what the error has to say."""
    yield "empty", "", "no ledger, or damaged"
    yield "cut", text[: len(text) // 2], "no ledger, or damaged"
    yield "a digit", text.replace('"steps": 200', '"steps": 100'), "checksum does not match"
    yield "no checksum", text.replace("checksum", "sum"), "checksum does not match"
    yield "an entry less", without_entries(text), "checksum does not match"
    yield "a list", "[1]", "no ledger of keras_dp"
    yield "another format", '{"format": "x"}', "no ledger of keras_dp"
    yield "bytes", b"\xff\xfe\x00", "cannot be read"
    yield "later", text.replace('"version": 1', '"version": 2'), "has version 2"
    yield "nonsense", resealed(text, "noise_multiplier", -1.0), "makes no sense.*noise_multiplier"
    yield "unknown", resealed(text, "surprise", 1), "makes no sense.*keys"


def without_entries(text):
    body = json.loads(text)
    body["entries"] = []
    return json.dumps(body)


def resealed(text, key, value):
    body = ledger_file.loads(text, "")
    body["entries"][0]["phase"][key] = value
    return ledger_file.dumps(body)


@pytest.mark.parametrize("case", range(11))
def test_damaged_files_are_refused_and_left_alone(path, new_process, case):
    live = opened(path)
    live.record(POISSON)
    _, content, match = list(damaged(path.read_text()))[case]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=match):
        live.record(POISSON)
    new_process()
    with pytest.raises(LedgerError, match=match):
        opened(path)
    with pytest.raises(LedgerError, match=match):
        keras_dp.callbacks.EpsilonLogger(
            num_examples=N, sampling="shuffle", delta=DELTA, ledger=path
        )
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "other, match",
    [
        ({"num_examples": N + 1}, "num_examples 1000; this one has 1001"),
        ({"name": "ward 8"}, "the name 'ward 7'; this one has 'ward 8'"),
        ({"fingerprint": "b"}, "the fingerprint 'a'; this one has 'b'"),
    ],
)
def test_another_data_set_is_refused(path, new_process, other, match):
    opened(path, name="ward 7", fingerprint="a").record(POISSON)
    new_process()
    with pytest.raises(LedgerError, match=match):
        opened(path, **other)
    assert opened(path, name="ward 7").steps == 200
    assert opened(path, fingerprint="a").name == "ward 7"


def test_a_new_ledger_needs_the_size_of_the_data(path):
    with pytest.raises(ValueError, match="no ledger at .* needs the size"):
        keras_dp.PrivacyLedger(path)
    with pytest.raises(ValueError, match="needs the size"):
        keras_dp.PrivacyLedger()


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "9", float("nan")])
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match="num_examples must be"):
        keras_dp.PrivacyLedger(num_examples=bad)


@pytest.mark.parametrize("bad", [{"name": ""}, {"name": 3}, {"fingerprint": b"x"}])
def test_bad_identities(bad):
    with pytest.raises(ValueError, match="must be a text or None"):
        opened(**bad)


@pytest.mark.parametrize("bad", ["", 3, "gs://bucket/ledger.json"])
def test_bad_paths(bad):
    with pytest.raises(LedgerError, match="file"):
        opened(bad)


def test_where_nothing_can_be_written(path):
    path.with_name("ledger.json.lock").mkdir()
    book = opened(path)
    with pytest.raises(LedgerError, match="cannot be written"):
        book.record(POISSON)
    path.with_name("ledger.json.lock").rmdir()
    book.record(POISSON)
    assert book.steps == 200


@pytest.mark.parametrize(
    "phase, match",
    [
        (Phase(num_examples=N + 1, batch_size=1, noise_multiplier=1.0), "uses 1001 examples"),
        (Phase(num_examples=N, batch_size=1, noise_multiplier=1.0, unit="user"), "per example"),
        (
            Phase(
                num_examples=N, batch_size=1, noise_multiplier=1.0, sampling="without_replacement"
            ),
            "different changes of the data",
        ),
    ],
    ids=str,
)
def test_what_does_not_add_up_is_refused(path, phase, match):
    book = opened(path)
    book.record(POISSON)
    with pytest.raises(LedgerError, match=match):
        book.record(phase)
    assert book.phases == [POISSON]


@pytest.mark.parametrize("bad", [None, 3, {"steps": 2}])
def test_only_phases_are_recorded(bad):
    with pytest.raises(ValueError, match=r"takes a keras_dp\.accounting\.Phase"):
        opened().record(bad)


def test_merging_counts_every_entry_once(path):
    here, there = opened(path), opened()
    here.record(POISSON)
    there.record(SHUFFLE)
    for _ in range(2):
        here.merge(there)
        assert here.steps == 225
    there.merge(keras_dp.PrivacyLedger.from_json(here.to_json()))
    assert there.steps == 225
    with pytest.raises(LedgerError, match="num_examples"):
        here.merge(opened(num_examples=N + 1))
    with pytest.raises(ValueError, match="takes a PrivacyLedger"):
        here.merge("ledger.json")


def test_a_crash_while_writing_leaves_the_old_file(path, monkeypatch):
    book = opened(path)
    book.record(POISSON)
    before = path.read_bytes()
    for broken in ("fsync", "replace", "chmod"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, lambda *_: (_ for _ in ()).throw(OSError("no room")))
            with pytest.raises(LedgerError, match="cannot be written .no room."):
                book.record(POISSON)
        assert path.read_bytes() == before and book.steps == 200
    assert sorted(os.listdir(path.parent)) == ["ledger.json", "ledger.json.lock"]


@pytest.mark.parametrize("how", ["deleted", "put back"])
def test_what_a_process_knows_survives_the_file(path, new_process, how):
    book = opened(path)
    book.record(POISSON)
    old = path.read_bytes()
    book.record(SHUFFLE)
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes(old)
    book.record(POISSON)
    new_process()
    assert opened(path).steps == 425


def _record(path, times):
    ledger._books = weakref.WeakValueDictionary()  # a fork knows what its parent knew
    book = opened(path)
    for _ in range(times):
        book.record(Phase(num_examples=N, batch_size=50, noise_multiplier=1.5, steps=1))
    os._exit(0)  # nothing of the parent's is to be cleaned up


def test_processes_that_write_at_the_same_time_lose_nothing(path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_record, args=(path, 20)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert opened(path).steps == 80


def test_without_file_locks_a_ledger_stays_in_memory(path, monkeypatch):
    monkeypatch.setattr(ledger_file, "fcntl", None)
    with pytest.raises(LedgerError, match="needs file locks"):
        opened(path)
    opened().record(POISSON)
