"""The Poisson sampler: batches whose law is the one that amplification by sampling is proved for.

A batch passes through these parts, a module each:

- `draws` numbers the draws, gives each its own random generator, and turns it into indices;
- `users` turns drawn people into some of their examples, when people are what is protected;
- `sources` reads those examples out of whatever holds them, and `examples` maps them;
- `batches` pads them to the batch's fixed size;
- `PoissonSampler` hands the batches to Keras, whole or in pieces.
"""

import contextlib
import itertools
import math
import numbers
import operator
import warnings
from collections.abc import Mapping

import keras
import tensorflow as tf
from keras import tree
from scipy.stats import binom

from keras_dp.errors import PrivacyError
from keras_dp.pieces import Piece
from keras_dp.sampling.batches import Batches, ClassWeight, is_targets_of_one_output
from keras_dp.sampling.checks import checked_int
from keras_dp.sampling.draws import (
    OVERFLOW_PROBABILITY,
    Draws,
    Process,
    default_capacity,
    poisson_indices,
)
from keras_dp.sampling.examples import DataSet, Examples, MappedExamples, names
from keras_dp.sampling.in_order import InOrder, refuse_workers
from keras_dp.sampling.shares import Share
from keras_dp.sampling.users import Users


class PoissonSampler(keras.utils.PyDataset):
    """Poisson batches of a data set, for `model.fit(sampler)`.

    Each batch is a fresh draw in which every one of the N examples takes part independently with
    probability q = batch_size / N, which is the sampling that amplification is proved for (Abadi
    et al. 2016, arXiv 1607.00133; Mironov et al. 2019, arXiv 1908.10530). A batch holds
    `batch_size` examples on average, and may hold any number from none to N. What is protected is
    one row of the data: the neighbouring relation is adding or removing one example. q counts as
    a public number; it is not recomputed for the neighbouring data set. A draw costs work and
    memory for the drawn examples only, whatever N is.

    An epoch is `steps_per_epoch` draws, by default ceil(N / batch_size). It does not pass over
    the data once: some examples are drawn several times, some never, and about 63 % (1 - 1/e) of
    them at least once. That is no fault; the guarantee depends on it.

    A batch is `(x, y, sample_weight)`, with `()` for y if there is none. The drawn rows come
    first, in rising order of their index, with their sample weight (float32; 1 by default).
    Padding follows, up to a multiple of `capacity` rows: zeros or empty strings, with the sample
    weight -0.0, by which the private step knows that the row holds no example (see
    `keras_dp.padding`). Nearly every batch has exactly `capacity` rows, so XLA compiles once. A
    larger draw is not cut: it has a multiple of `capacity` rows. An empty draw is a batch of
    padding, and still an update. Without a DP optimizer padding has a weight of zero in the loss
    and in `weighted_metrics`, but counts in `metrics` and in the mean's denominator.

    **Users.** With `users`, the ids of the people whom the examples belong to, what is drawn are
    people, each with probability q = batch_size / (number of users), and of each at most
    `examples_per_user` examples, any of them with the same probability. What is protected is then
    one user with all their examples. `batch_size`, `capacity` and `physical_batch_size` count
    users; a batch has `examples_per_user` rows for each, one user after the other, filled up with
    padding. The DP optimizer needs the same `examples_per_user`, to clip each user once.

    **Pieces.** With `physical_batch_size=m` a draw is delivered in pieces of m rows, for large
    updates in little memory: x of a batch is a `keras_dp.pieces.Piece`, and the DP optimizer
    updates when the last piece of a draw has arrived. An epoch is then `steps_per_epoch` times
    ceil(capacity / m) batches. The last piece of a draw above `capacity` is longer, by a multiple
    of m. Pieces come in order, to one reader: two at a time would each get parts of a draw.

    **Functions.** `map_fn` changes each drawn example (decodes, crops, pads) in threads, while
    the step runs. It gets what the data set has, `map_fn(x)`, `map_fn(x, y)` or
    `map_fn(x, y, sample_weight)`, and returns the same or any other of these; only what it returns
    must be arrays of one shape and dtype. If it has an argument `rng`, it gets a
    `numpy.random.Generator` there, of its own for every example of every draw, which a sampler
    with a fixed `seed` repeats. It must look at its example only.

    Every call of `sampler[index]` is a new draw, whatever the index, the epoch, the thread or the
    process: nothing that Keras does (reading batches ahead, looking at the first ones for their
    shape, stopping early, fitting again) uses one draw for two updates. Do not do so by hand: an
    update must not see a batch that was kept from before. (With pieces, `sampler[index]` is the
    next piece, and iterating over the sampler begins with a new draw.) The random numbers come
    from Philox with a 128-bit secret of the operating system. A copy of a sampler (pickled,
    `copy.deepcopy`, a worker process) draws with a secret of its own; the secret is neither
    pickled nor shown.

    Args:
      x: array `[N, ...]`, or a dict, list or tuple of them. Any object will do that has
        `__len__` and a `__getitem__` that takes an int array (memory maps and HDF5 data sets are
        read row by row) or an int and gives one example (`tfds.data_source`, Grain and PyTorch
        data sets; several are read at once by `__getitems__` where there is one), and another
        PyDataset (whose whole batches are read for the examples in them). Examples may be dicts
        and tuples; given alone, a tuple is (x, y) or (x, y, sample_weight), as Keras has it.
        Tensors and pandas data are converted once, ragged rows need `keras_dp.Padded`. Dtypes
        are kept. Text arrives as string tensors.
      y: as `x`; targets. None if the model needs none.
      sample_weight: array `[N]` or `[N, ...]`, or one for each output in the structure of `y`.
      batch_size: int in [1, N], the expected number of examples (or users) in a batch. The same
        number as the DP optimizer's.
      steps_per_epoch: int, draws in an epoch. Defaults to ceil(N / batch_size).
      seed: None draws the secret from the operating system. A fixed int is for tests: whoever
        knows it knows every batch, and each run repeats them; a warning says so.
      capacity: int >= 1, rows of a padded batch. By default the smallest multiple of 8 that at
        most one draw in 1e9 exceeds, and never more than N.
      physical_batch_size: int >= 1, or None: rows of a piece.
      users: array `[N]` of ids (numbers or text) of the users, or None.
      examples_per_user: int >= 1, with `users`: the most examples of one user in an update.
      class_weight: dict from class to factor on the sample weight, for one output with integer or
        one-hot labels; 1 for classes not in it. (`fit` refuses its own `class_weight` beside
        sample weights.) Factors count as public: those computed from the data are not private.
      map_fn: function of one example, see above.
      threads: int >= 1, how many threads read examples and run `map_fn`, for sources that let
        several threads read at a time (TensorFlow Datasets and Grain do). By default one thread
        reads, and `map_fn` runs in one for each CPU, at most 16. Python code that holds the
        interpreter's lock gains from processes instead: `workers=..., use_multiprocessing=True`.
      **kwargs: `workers`, `use_multiprocessing`, `max_queue_size` of `keras.utils.PyDataset`.

    Attributes:
      sampling: "poisson".

    Raises:
      TypeError: data that cannot be read by index, or numbers of a wrong type.
      ValueError: lengths that differ, no examples, or numbers outside their range.
    """

    sampling = "poisson"

    def __init__(
        self,
        x,
        y=None,
        sample_weight=None,
        *,
        batch_size,
        steps_per_epoch=None,
        seed=None,
        capacity=None,
        physical_batch_size=None,
        users=None,
        examples_per_user=None,
        class_weight=None,
        map_fn=None,
        threads=None,
        **kwargs,
    ):
        _check_keywords(kwargs)
        super().__init__(**kwargs)
        data = DataSet(x, y, sample_weight)
        self._num_examples = data.length
        if map_fn is None:
            examples = Examples(data, threads)
        else:
            examples = MappedExamples(data, map_fn, threads)
        self._set_users(users, examples_per_user)
        self._batch_size = checked_int(batch_size, "batch_size", 1)
        if self._batch_size > self.num_units:
            raise ValueError(
                f"batch_size={batch_size} is larger than the data set of {self.num_units} "
                f"{self.unit}s. Each is drawn with probability batch_size / N, so batch_size "
                f"must be at most N: pass batch_size <= {self.num_units}."
            )
        if steps_per_epoch is None:
            steps_per_epoch = -(-self.num_units // self._batch_size)
        self._steps_per_epoch = checked_int(steps_per_epoch, "steps_per_epoch", 1)
        self._capacity = None if capacity is None else checked_int(capacity, "capacity", 1)
        self._share = Share()
        self._physical = None
        if physical_batch_size is not None:
            self._physical = checked_int(physical_batch_size, "physical_batch_size", 1)
            refuse_workers(
                "PoissonSampler", "with physical_batch_size has pieces in order", **kwargs
            )
        self._batches = Batches(examples, _checked_class_weight(class_weight, examples))
        self._seeded = seed is not None
        if self._seeded:
            seed = checked_int(seed, "seed", 0)
            warnings.warn(
                "PoissonSampler got a fixed seed: its batches can be predicted and every run "
                "repeats them, so no privacy can be claimed. Use a seed in tests only, and "
                "seed=None to train. (Worker processes ignore it and draw unpredictably.)",
                stacklevel=2,
            )
        self._draws = Draws(seed)
        self._in_order = InOrder(self._endless_pieces)

    @property
    def num_examples(self):
        """N, the number of examples in the data set."""
        return self._num_examples

    @property
    def unit(self):
        """What is drawn, clipped and protected: "example" or "user"."""
        return "example" if self._users is None else "user"

    @property
    def num_units(self):
        """How many examples, or users, are drawn from."""
        return self._num_examples if self._users is None else self._users.number

    @property
    def examples_per_user(self):
        """The most examples of one user in an update; None if examples are drawn."""
        return self._examples_per_user

    @property
    def batch_size(self):
        """Expected number of examples, or users, in a draw."""
        return self._batch_size

    @property
    def sampling_probability(self):
        """q = batch_size / num_units, with which each example, or user, enters a draw."""
        return self._batch_size / self.num_units

    @property
    def capacity(self):
        """Units that a padded draw holds; one that exceeds it is padded to a multiple of it.

        In a `fit` of several workers, what this worker's part of a draw holds.
        """
        most = self._share.largest(self.num_units)
        if self._capacity is None:
            return self._share.room(default_capacity(most, self.sampling_probability))
        return self._share.room(self._share.largest(self._capacity))

    @property
    def physical_batch_size(self):
        """Units in a piece of a draw, of one worker; None if draws are delivered whole."""
        if self._physical is None:
            return None
        return self._share.room(self._share.largest(self._physical))

    @property
    def pieces_per_draw(self):
        """Batches in which one draw is delivered."""
        return 1 if self._physical is None else -(-self.capacity // self.physical_batch_size)

    @property
    def steps_per_epoch(self):
        """Draws in an epoch."""
        return self._steps_per_epoch

    @property
    def updates_drawn(self):
        """How many draws this object has handed out, or begun to, in this process."""
        return self._own_draws().count

    @property
    def batches_drawn(self):
        """The same number as `updates_drawn`."""
        return self.updates_drawn

    @property
    def num_batches(self):
        """Batches in an epoch. Whoever asks begins to read, with the first piece of a draw."""
        self._in_order.begin()
        return len(self)

    def __len__(self):
        return self._steps_per_epoch * self.pieces_per_draw

    def __getitem__(self, index):
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}). Received: {index}.")
        if self._physical is not None:
            return self._in_order.next()
        draw, units = self._draw(index)
        return self._gather(draw, units, self._padded(len(units)))

    def __iter__(self):
        for index in range(self._steps_per_epoch):
            yield from self._delivered(index)

    def as_tf_dataset(self, *, endless=False):
        """The same batches as a `tf.data.Dataset` with a static batch dimension.

        For TPUs, and wherever XLA must know every shape. Each iteration over it draws afresh.
        `repeat()` and `prefetch()` keep that; `cache()`, `snapshot()` and `save()` would use
        batches again, and `shard()`, or auto-sharding over several workers, would give each
        worker batches of its own: none of these is Poisson sampling.

        Args:
          endless: False for the `len(self)` batches of one epoch, so that `fit(dataset,
            epochs=e)` does as many updates as `fit(sampler, epochs=e)`; True for batches without
            end (give `fit` its `steps_per_epoch`).

        Returns:
          `tf.data.Dataset` of `(x, y, sample_weight)`, `[capacity, ...]` each, or
          `[physical_batch_size, ...]`; times `examples_per_user`.

        Raises:
          ValueError: a draw exceeds `capacity` with a probability above 1e-9.
          PrivacyError: while iterating, when a draw exceeds `capacity` all the same: it does not
            fit the static shape, and to cut it would change the sampling that is accounted for.
        """
        size = self.physical_batch_size or self.capacity
        room = size * self.pieces_per_draw
        drawn_from = self._share.largest(self.num_units)
        excess = binom.sf(room, drawn_from, self.sampling_probability)
        if excess > OVERFLOW_PROBABILITY:
            needed = default_capacity(drawn_from, self.sampling_probability)
            raise ValueError(
                f"capacity={self.capacity} is too small for a static batch: a draw exceeds it "
                f"with probability {excess:.1e}, allowed is {OVERFLOW_PROBABILITY:.0e}. Pass "
                f"capacity={needed} or more to PoissonSampler, or leave it out."
            )

        return self._dataset(size, room, endless)

    def _dataset(self, size, room, endless=False, split=1):
        """The batches as a dataset, each in `split` equal parts.

        Args:
          size: int, units of an element; None where it may vary.
          room: int, units that a draw must not exceed, or None.
        """

        def batches():
            for _ in itertools.count() if endless else range(1):
                for index in range(self._steps_per_epoch):
                    for batch in self._delivered(index, room):
                        yield from _parts(batch, split)

        rows = None if size is None else size * self._rows_per_unit
        x, y, weight = self._batches.tensor_spec(rows)
        if self._physical is not None:
            number, flag = tf.TensorSpec((rows,), tf.int64), tf.TensorSpec((rows,), tf.bool)
            x = Piece(x, draw=number, last=flag, position=number)
        dataset = tf.data.Dataset.from_generator(batches, output_signature=(x, y, weight))
        length = tf.data.INFINITE_CARDINALITY if endless else len(self) * split
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
        return dataset.prefetch(tf.data.AUTOTUNE)

    def as_worker_dataset(self):
        """The batches of this worker as a `tf.data.Dataset` of what each replica gets, in turn.

        What `fit` trains on under `MultiWorkerMirroredStrategy`; see `delivered_to`. Batch sizes
        may vary, so draws of any size fit.
        """
        return self._dataset(None, None, split=self._share.replicas)

    @contextlib.contextmanager
    def delivered_to(self, share):
        """While open, batches are those of one worker, laid out for its replicas.

        `fit` does so under a `tf.distribute` strategy.

        Args:
          share: `keras_dp.sampling.shares.Share`.
        """
        before, draws = self._share, self._own_draws()
        self._share = share
        if share.workers > 1:
            self._draws = draws.of_worker(share.worker)
        try:
            yield
        finally:
            self._share = before

    def __repr__(self):
        users = pieces = ""
        if self._users is not None:
            users = f"num_users={self.num_units}, examples_per_user={self.examples_per_user}, "
        if self._physical is not None:
            pieces = f"physical_batch_size={self._physical}, "
        return (
            f"PoissonSampler(num_examples={self.num_examples}, {users}"
            f"batch_size={self.batch_size}, "
            f"sampling_probability={self.sampling_probability:.6g}, "
            f"steps_per_epoch={self.steps_per_epoch}, capacity={self.capacity}, {pieces}"
            f"seeded={self._seeded})"
        )

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["_draws"], state["_in_order"]
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._seeded = False
        self._draws = Draws()
        self._in_order = InOrder(self._endless_pieces)

    @property
    def _rows_per_unit(self):
        return self._examples_per_user or 1

    def _set_users(self, users, examples_per_user):
        self._users = self._examples_per_user = None
        if users is None and examples_per_user is None:
            return
        if users is None or examples_per_user is None:
            raise ValueError(
                "users and examples_per_user go together. Received: "
                f"users={'None' if users is None else 'ids'}, "
                f"examples_per_user={examples_per_user}. Pass the ids of the users of the "
                "examples [N], and the most examples of one user that an update may use."
            )
        self._examples_per_user = checked_int(examples_per_user, "examples_per_user", 1)
        self._users = Users(users)
        if self._users.examples != self._num_examples:
            raise ValueError(
                "users must have one id per example. Received: "
                f"{self._users.examples} ids for {self._num_examples} examples."
            )

    def _own_draws(self):
        # A forked child shares its parent's secret and counts until it takes its own.
        draws = self._draws
        if draws.process is not Process.current:
            self._seeded = False
            draws = self._draws = Draws()
        return draws

    def _draw(self, index):
        """A draw and the indices of its examples: `[units, rows of a unit]`, -1 for padding."""
        draw = self._own_draws().next(index)
        number, probability = self._share.size(self.num_units), self.sampling_probability
        units = self._share.units(poisson_indices(draw.generator, number, probability))
        if self._users is None:
            return draw, units[:, None]
        return draw, self._users.choose(units, self._examples_per_user, draw.generator)

    def _padded(self, units):
        """Units of the batch, or of the pieces, that hold so many."""
        if self._physical is None:
            return self.capacity * max(1, -(-units // self.capacity))
        size = self.physical_batch_size
        return size * max(self.pieces_per_draw, -(-units // size))

    def _gather(self, draw, units, size, first=0):
        """The batch of these units, padded to `size`; the first of them is the draw's `first`."""
        rows = self._rows_per_unit
        indices = self._share.spread(units, size).reshape(-1)
        return self._batches.gather(indices, size * rows, draw, first * rows)

    def _delivered(self, index, room=None):
        """The batches of one draw: itself, or its pieces.

        Every piece but the last has `physical_batch_size` units, the last one all that are left:
        so their number is the same for every draw, and no draw is cut.
        """
        draw, units = self._draw(index)
        if room is not None and len(units) > room:
            raise PrivacyError(
                f"A draw of {len(units)} {self.unit}s exceeds the static capacity={room}. Start "
                "again with a larger capacity, or give `fit` the sampler itself, which takes draws "
                "of any size."
            )
        size = self._padded(len(units))
        if self._physical is None:
            yield self._gather(draw, units, size)
            return
        for position in range(self.pieces_per_draw):
            last = position == self.pieces_per_draw - 1
            begin = position * self.physical_batch_size
            end = size if last else begin + self.physical_batch_size
            x, y, weight = self._gather(draw, units[begin:end], end - begin, begin)
            rows = (end - begin) * self._rows_per_unit
            yield Piece.of(x, rows, draw.number, last, position), y, weight

    def _endless_pieces(self):
        for index in itertools.cycle(range(self._steps_per_epoch)):
            yield from self._delivered(index)


def _parts(batch, number):
    """A batch in equal parts along its rows."""
    if number == 1:
        return [batch]
    rows = len(tree.flatten(batch)[-1]) // number
    return [
        tree.map_structure(lambda array, k=k: array[k * rows : (k + 1) * rows], batch)
        for k in range(number)
    ]


def _check_keywords(kwargs):
    unknown = set(kwargs) - {"workers", "use_multiprocessing", "max_queue_size"}
    if any("weight" in name or "prob" in name or name == "replacement" for name in unknown):
        raise TypeError(
            f"PoissonSampler draws all examples with the same probability; it has no argument "
            f"{', '.join(sorted(unknown))}. Drawing some more often would spend more privacy on "
            "them (epsilon would have to be that of the largest probability, and probabilities "
            "that depend on the data are themselves not private). For rare classes use "
            "class_weight or sample_weight: they change the loss before the clip, which keeps "
            "the bound and epsilon."
        )
    if unknown:
        raise TypeError(
            f"PoissonSampler has no argument {', '.join(sorted(unknown))}. Beside its own it takes "
            "workers, use_multiprocessing and max_queue_size."
        )


def _checked_class_weight(class_weight, examples):
    if class_weight is None:
        return None
    targets = examples.specs[1]
    if not is_targets_of_one_output(targets):
        raise ValueError(
            "class_weight needs y to be one array of integer labels [N] or [N, 1], or one-hot "
            f"labels [N, classes]. Received: y={names(targets)}. Put the factors into "
            "sample_weight instead."
        )
    if not isinstance(class_weight, Mapping):
        raise TypeError(
            f"class_weight must be a dict from class to weight. Received: {class_weight!r}."
        )
    weights = {}
    for label, weight in class_weight.items():
        label = checked_int(label, "each class in class_weight", 0)
        if not isinstance(weight, numbers.Real) or not 0 <= weight < math.inf:
            raise ValueError(
                "each weight in class_weight must be a finite number >= 0. "
                f"Received: {weight!r} for class {label}."
            )
        weights[label] = float(weight)
    return ClassWeight(weights, targets)
