"""What was released on one data set, over all optimizers, runs and processes.

A ledger is a list of entries. An entry is a stretch of updates of one run that one writer (an
optimizer in a process) made or was about to make: a :class:`Phase` with the number of its first
update. Epsilon composes them all. Stretches of a run may overlap: of a run that crashed and was
resumed from an earlier checkpoint, both continuations were made, and both count.

What makes the sum no less than what reached the outside:

* an entry is written *before* its updates are made, and set to their true number afterwards by
  its own writer alone; after a crash it stays at what had been written;
* a writer reads what all others wrote, and replaces the file, under one lock;
* of two states of an entry the later one (`Entry.revision`) wins, so that a file that was deleted,
  or put back to an older copy, under a running process does not take anything away.
"""

import contextlib
import dataclasses
import secrets
import threading
import weakref

from keras_dp.accounting import ledger_file
from keras_dp.accounting.checks import checked_delta, checked_int
from keras_dp.accounting.composition import epsilon_of_phases
from keras_dp.accounting.phases import Phase, common_relation
from keras_dp.accounting.statement import report_of_phases, statement_of_phases
from keras_dp.errors import LedgerError


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stretch of updates of one run.

    Attributes:
      run: str, which run; see :mod:`keras_dp.optimizers.lineage`.
      writer: str, who wrote the entry and alone may change it.
      start: int >= 0, updates that the run had made before.
      phase: :class:`Phase`, the updates; ``phase.steps`` of them.
      revision: int >= 0, how often the writer has changed the entry.
    """

    run: str
    writer: str
    start: int
    phase: Phase
    revision: int = 0

    @property
    def stop(self):
        """int, updates of the run up to the end of this stretch."""
        return self.start + self.phase.steps

    def to_dict(self):
        """As a dict for JSON."""
        return {**dataclasses.asdict(self), "phase": self.phase.to_dict()}

    @classmethod
    def from_dict(cls, values):
        """What :meth:`to_dict` wrote."""
        entry = cls(**{**values, "phase": Phase.from_dict(values["phase"])})
        if not (isinstance(entry.run, str) and isinstance(entry.writer, str) and entry.writer):
            raise ValueError(f"run and writer must be text; received {values!r}.")
        checked_int("start", entry.start, 0, "Count updates.")
        checked_int("revision", entry.revision, 0, "Count changes.")
        return entry


class PrivacyLedger:
    """The account of one data set: every noisy update that was computed from it.

        ledger = keras_dp.PrivacyLedger("checkpoints/privacy_ledger.json", num_examples=60000,
                                        name="ward 7, 2019 to 2023")
        logger = keras_dp.callbacks.EpsilonLogger(sampler, delta=1e-6, ledger=ledger)
        ledger.epsilon(delta=1e-6)

    Trainings that share a ledger compose: several ``fit`` calls, several optimizers (a head first,
    then all layers), several models, several processes, at once or one after the other. The
    ledger belongs to the data, not to a model. Keep one for each data set for as long as anything
    is trained on it; a search for hyperparameters that uses it is counted too.

    On disk it is a JSON file with a checksum, replaced as a whole at each change. Writers wait for
    each other (a lock file lies beside it). It holds settings and counts only, nothing that was
    computed from the data, and may be published with the model.

    Args:
      path: str or path of the file, which is read if it exists and made at the first update
        otherwise; a folder stands for ``privacy_ledger.json`` in it. None keeps the ledger in
        memory.
      num_examples: int >= 1, units (examples, or users) of the data set. May be left out for a
        file that exists. Phases may use a part of them, such as the training part of a split.
      name: str, what the data set is called, or None.
      fingerprint: str, a hash of the data set or a version id, or None. Of sensitive data choose
        one that nobody can test guesses against.

    Raises:
      LedgerError: a file that is damaged, of a later version, or of a data set with another
        number of examples, name or fingerprint.
      ValueError: an argument of the wrong kind.
    """

    def __init__(self, path=None, *, num_examples=None, name=None, fingerprint=None):
        if num_examples is not None:
            num_examples = checked_int("num_examples", num_examples, 1, "Count the whole data set.")
        for what, value in (("name", name), ("fingerprint", fingerprint)):
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{what} must be a text or None; received {value!r}.")
        self._book = _book_at(ledger_file.checked_path(path) if path is not None else None)
        with self._book.reading():
            data = {"num_examples": num_examples, "name": name, "fingerprint": fingerprint}
            self._book.identify(data)
        if self.num_examples is None:
            where = f"There is no ledger at {self.path} yet: a" if self.path else "A"
            raise ValueError(
                f"{where} new ledger needs the size of its data set. Pass num_examples=."
            )

    @property
    def path(self):
        """``pathlib.Path`` of the file, or None."""
        return self._book.path

    @property
    def num_examples(self):
        """int, units of the data set."""
        return self._book.data["num_examples"]

    @property
    def name(self):
        """str or None, what the data set is called."""
        return self._book.data["name"]

    @property
    def fingerprint(self):
        """str or None, identifies the data set."""
        return self._book.data["fingerprint"]

    @property
    def entries(self):
        """tuple of :class:`Entry`, as they are now: trainings of this process up to date."""
        with self._book.reading():
            return tuple(self._book.entries_now())

    @property
    def phases(self):
        """list of :class:`keras_dp.accounting.Phase`, one for each kind of updates, in order."""
        return merged_phases(entry.phase for entry in self.entries)

    @property
    def steps(self):
        """int, updates of all phases."""
        return sum(phase.steps for phase in self.phases)

    def epsilon(self, delta, accountant="rdp"):
        """The epsilon of everything that was released on the data set.

        Args:
          delta: float in (0, 1).
          accountant: "rdp", or "pld", which is tighter and slower.

        Returns:
          float: 0.0 if there was no update, and above 0 otherwise. ``inf`` if one had no noise.

        Raises:
          ValueError: not such arguments.
        """
        return epsilon_of_phases(self.phases, checked_delta(delta), accountant)

    def report(self, delta):
        """The guarantee for everything that was released, as a dict that JSON can hold.

        Args:
          delta: float in (0, 1).

        Returns:
          dict; see :func:`keras_dp.privacy_report`. Its "statement" is :meth:`statement`.

        Raises:
          ValueError: not such a delta, or nothing was released.
        """
        return report_of_phases(self.phases, delta)

    def statement(self, delta):
        """The guarantee for everything that was released, for people.

        Args:
          delta: float in (0, 1).

        Returns:
          str; see :func:`keras_dp.privacy_statement`.
        """
        phases = self.phases
        return statement_of_phases(phases, delta) if phases else "Privacy: nothing was released."

    def record(self, phase):
        """Adds what was released by other means: a custom loop, another program, a query.

        Args:
          phase: :class:`keras_dp.accounting.Phase`. It counts in full, whatever is there already.

        Raises:
          ValueError: not a phase.
          LedgerError: one of more units than the data set has, of another unit, or with which no
            common guarantee is known; or the file cannot be written.
        """
        if not isinstance(phase, Phase):
            raise ValueError(f"record takes a keras_dp.accounting.Phase; received {phase!r}.")
        with self._book.exclusive():
            self._book.check(phase)
            self._book.put(Entry(secrets.token_hex(16), secrets.token_hex(16), 0, phase))

    def merge(self, other):
        """Takes over the entries of another ledger of the same data set, each once.

        For ledgers of trainings that could not share a file. Merging the same one again, or one
        that this ledger was copied from, changes nothing.

        Args:
          other: :class:`PrivacyLedger`.

        Raises:
          ValueError: not a ledger.
          LedgerError: one of other data.
        """
        if not isinstance(other, PrivacyLedger):
            raise ValueError(f"merge takes a PrivacyLedger; received {type(other).__name__}.")
        entries, data = other.entries, dict(other._book.data)
        with self._book.exclusive():
            self._book.identify(data)
            for entry in entries:
                self._book.check(entry.phase)
                self._book.take(entry)

    def to_json(self):
        """The ledger as text, with a version and a checksum; see :meth:`from_json`."""
        return ledger_file.dumps({"data": self._book.data, **_entries_as_json(self.entries)})

    @classmethod
    def from_json(cls, text):
        """A ledger in memory with the content that :meth:`to_json`, or a file, has.

        Args:
          text: str.

        Returns:
          :class:`PrivacyLedger`.

        Raises:
          LedgerError: text that is damaged or of a later version.
        """
        book = _Book(None)
        book.merge(ledger_file.loads(text, "The text"), "The text")
        ledger = object.__new__(cls)
        ledger._book = book
        return ledger

    def __repr__(self):
        where = f"{str(self.path)!r}, " if self.path else ""
        named = f", name={self.name!r}" if self.name else ""
        return (
            f"PrivacyLedger({where}num_examples={self.num_examples}{named}: "
            f"{self.steps} updates in {len(self.entries)} entries)"
        )


def merged_phases(phases):
    """Phases of equal settings joined into one each, those without updates left out.

    Args:
      phases: iterable of :class:`Phase`.

    Returns:
      list of :class:`Phase`, in the order in which their settings first come.
    """
    totals = {}
    for phase in phases:
        if phase.steps:
            settings = dataclasses.replace(phase, steps=0, epochs_begun=_passes(phase, 0))
            steps, passes = totals.get(settings, (0, 0))
            # No more passes than updates can show: else those of one phase would count for another.
            shown = min(phase.passes, phase.participations_per_update * phase.steps)
            totals[settings] = steps + phase.steps, passes + shown
    return [
        dataclasses.replace(settings, steps=steps, epochs_begun=_passes(settings, passes))
        for settings, (steps, passes) in totals.items()
    ]


def _unit(phase):
    most = phase.examples_per_user
    return phase.unit if most is None else f"{phase.unit} with at most {most} examples"


def _passes(phase, passes):
    return passes if phase.sampling == "shuffle" else None


class _Book:
    """The entries behind one ledger: in memory and, with a path, on disk.

    All ledgers of a process with the same path share one.

    Attributes:
      path: ``pathlib.Path`` or None.
      data: dict that identifies the data set.
      live: dict from writer to a function that gives its entry as of now. What a training of
        this process has reserved is more than what it has made.
      spendings: for whoever writes: weak dict from optimizer to what follows it.
    """

    def __init__(self, path):
        self.path = path
        self.data = dict.fromkeys(_IDENTITY)
        self.live = {}
        self.spendings = weakref.WeakKeyDictionary()
        self._entries = {}
        self._mutex = threading.RLock()
        self._writing = False

    @contextlib.contextmanager
    def reading(self):
        """While open, the entries are those of the file, and no other thread changes them."""
        with self._mutex:
            self._refresh()
            yield

    @contextlib.contextmanager
    def exclusive(self):
        """While open, no other thread or process writes. What is put counts from the end on.

        After an error nothing of it counts.
        """
        with self._mutex:
            if self.path is None or self._writing:
                yield
                return
            with ledger_file.locked(self.path):
                self._refresh()
                before, self._writing = dict(self._entries), True
                try:
                    yield
                    content = {"data": self.data, **_entries_as_json(self._entries.values())}
                    ledger_file.write(self.path, content)
                except BaseException:
                    self._entries = before
                    raise
                finally:
                    self._writing = False

    def _refresh(self):
        content = ledger_file.read(self.path) if self.path is not None else None
        if content is not None:
            self.merge(content, f"The ledger {self.path}")

    def merge(self, content, source):
        """Takes over what a file holds."""
        try:
            data = {key: content["data"][key] for key in _IDENTITY}
            checked_int("num_examples", data["num_examples"], 1, "Count the data set.")
            entries = [Entry.from_dict(values) for values in content["entries"]]
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"{source} has an entry that makes no sense: {error}") from error
        self.identify(data)
        for entry in entries:
            self.take(entry)

    def identify(self, data):
        """Checks that ``data`` may be this data set; what was not known of it is now."""
        for key, words in _IDENTITY.items():
            mine, theirs = self.data[key], data[key]
            if mine is not None and theirs is not None and mine != theirs:
                where = f" at {self.path}" if self.path else ""
                raise LedgerError(
                    f"The ledger{where} is of a data set with {words} {mine!r}; this one has "
                    f"{theirs!r}. What is spent on one data set says nothing about another: pass "
                    "the ledger of this one, or a new path. If it is the same data set, give it "
                    f"the same {key}."
                )
        self.data.update({k: v for k, v in data.items() if v is not None})

    def check(self, phase):
        """Refuses a phase that cannot be of this data set, or not be composed with the others."""
        if phase.num_examples > self.data["num_examples"]:
            raise LedgerError(
                f"The training uses {phase.num_examples} {phase.unit}s, but the ledger is of a "
                f"data set of {self.data['num_examples']}. Pass the ledger of the data that is "
                "trained on."
            )
        phases = [entry.phase for entry in self._entries.values()]
        for earlier in phases:
            mine, new = _unit(earlier), _unit(phase)
            if mine != new:
                raise LedgerError(
                    f"The ledger counts what is spent per {mine}; this training spends per {new}. "
                    "The two do not add up: keep a ledger for each unit."
                )
        try:
            common_relation([*phases, phase])
        except ValueError as error:
            raise LedgerError(f"The ledger cannot hold this training: {error}") from error

    def entries_now(self):
        """The entries, those of this process's trainings as of now."""
        for writer, entry in list(self._entries.items()):
            yield self.live[writer]() if writer in self.live else entry

    def entries_reserved(self):
        """The entries, those of this process's trainings with all that they may still make."""
        for writer, entry in list(self._entries.items()):
            now = self.live[writer]() if writer in self.live else entry
            yield max(entry, now, key=lambda e: (e.phase.steps, e.phase.passes))

    def put(self, entry):
        """Adds an entry, or the new state of one's own."""
        self._entries[entry.writer] = entry

    def take(self, entry):
        """Adds another's entry; of two states of one, the later stays."""
        known = self._entries.get(entry.writer)
        if known is None or known.revision < entry.revision:
            self._entries[entry.writer] = entry

    def covered(self, run):
        """int, how many updates of ``run``, from the first on, are in entries without a gap."""
        reached = 0
        for entry in sorted(self._entries.values(), key=lambda entry: entry.start):
            if entry.run == run and entry.start <= reached:
                reached = max(reached, entry.stop)
        return reached


_IDENTITY = {"num_examples": "num_examples", "name": "the name", "fingerprint": "the fingerprint"}

_books = weakref.WeakValueDictionary()
_books_mutex = threading.Lock()


def _book_at(path):
    if path is None:
        return _Book(None)
    with _books_mutex:
        book = _books.get(path)
        if book is None:
            book = _books[path] = _Book(path)
        return book


def _entries_as_json(entries):
    return {"entries": [entry.to_dict() for entry in entries]}
