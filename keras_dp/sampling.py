"""Poisson sampling: batches whose law is the one that amplification by sampling is proved for.

The parts, in the order in which a batch passes through them:

- `_Draws` numbers the draws and gives each its own random generator;
- `poisson_indices` turns a generator into the indices of one draw;
- `_Column` gathers those rows of one array and pads them to the batch's fixed size;
- `PoissonSampler` holds the data set and hands the batches to Keras.
"""

import hashlib
import itertools
import math
import multiprocessing
import numbers
import operator
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from scipy.stats import binom

from keras_dp.errors import PrivacyError
from keras_dp.padding import PADDING_WEIGHT

# At most one draw in a billion exceeds the default capacity.
OVERFLOW_PROBABILITY = 1e-9


def poisson_indices(generator, num_examples, probability):
    """Draws each of `num_examples` examples independently with the same probability.

    The gaps between the chosen examples of such a draw are independent and geometric. Drawing
    the gaps instead of one coin per example gives the same law at the cost of the chosen
    examples alone, and gives them in rising order, as files on disk like to be read. (Devroye
    1986, "Non-Uniform Random Variate Generation", section X.4, waiting times.)

    Args:
      generator: `numpy.random.Generator`.
      num_examples: int >= 1.
      probability: float in (0, 1].

    Returns:
      int64 array `[size]` of distinct indices below `num_examples`, rising;
      `size` follows Binomial(num_examples, probability) and may be 0.
    """
    mean = num_examples * probability
    block = math.ceil(mean + 6 * math.sqrt(mean * (1 - probability)) + 8)
    indices = np.cumsum(generator.geometric(probability, block)) - 1
    while indices[-1] < num_examples:
        more = np.cumsum(generator.geometric(probability, block)) + indices[-1]
        indices = np.concatenate([indices, more])
    return indices[: np.searchsorted(indices, num_examples)]


def default_capacity(num_examples, probability):
    """Rows that hold all draws but one in a billion: a multiple of 8, at most `num_examples`."""
    quantile = int(binom.isf(OVERFLOW_PROBABILITY, num_examples, probability))
    return min(-(-max(quantile, 1) // 8) * 8, num_examples)


class _Process:
    """Stands for this process: a forked child gets an instance of its own."""

    current = object()

    @classmethod
    def renew(cls):
        cls.current = object()


# A process id would not do: ids are used again, and each container has its own.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Process.renew)


class _Draws:
    """A secret, and a generator for each draw that is a pure function of it.

    The generator of a draw is Philox with key = secret and counter = (round, index), where the
    round of an index is how often it was asked for before. So the draws of different indices, or
    of the same index at different times, come from disjoint parts of one counter space, whoever
    asks and in whatever order: no two draws of one object share a random number.
    """

    def __init__(self, seed=None):
        if seed is None:
            secret = os.urandom(16)
        else:
            # The label keeps this stream apart from any other that is built on the same seed.
            secret = hashlib.blake2b(
                str(seed).encode(), digest_size=16, person=b"keras_dp sampler"
            ).digest()
        self._secret = int.from_bytes(secret, "little")
        self._rounds = Counter()
        self._lock = threading.Lock()
        self.process = _Process.current
        self.count = 0

    def next_generator(self, index):
        with self._lock:
            round_of_index = self._rounds[index]
            self._rounds[index] += 1
            self.count += 1
        # The two low words of the counter are those that the generator itself advances.
        philox = np.random.Philox(key=self._secret, counter=[0, 0, round_of_index, index])
        return np.random.Generator(philox)


class _Column:
    """One array of the data set: gathers rows of it and pads them.

    Attributes:
      length: int, rows of the array.
      row_shape: tuple, shape of one row.
      dtype: NumPy dtype of the batches; object for text.
    """

    def __init__(self, source, name):
        self.name = name
        self._source = _random_access(source, name)
        self.length = _length(self._source, name)
        if self.length == 0:
            raise ValueError(
                f"{name} holds no examples (length 0). Pass at least one example: there is "
                "nothing to sample from."
            )
        row = self._probe()
        self.row_shape = row.shape[1:]
        self.is_text = row.dtype.kind in "OUST"
        self.dtype = np.dtype(object) if self.is_text else row.dtype

    def rows(self, indices):
        """The rows at `indices`, `[len(indices), *row_shape]`."""
        if len(indices) == 0:  # some lazy sources cannot take an empty index
            return np.zeros((0, *self.row_shape), self.dtype)
        rows = np.asarray(self._source[indices])
        same_dtype = self.is_text or rows.dtype == self.dtype
        if rows.shape != (len(indices), *self.row_shape) or not same_dtype:
            raise ValueError(
                f"{self.name} must give rows of one shape and dtype. Received: shape {rows.shape} "
                f"and dtype {rows.dtype} for {len(indices)} indices, expected "
                f"{(len(indices), *self.row_shape)} and {self.dtype}."
            )
        return rows

    def take(self, indices, size):
        """The rows at `indices`, then zeros (empty strings), `[size, *row_shape]`."""
        batch = np.zeros((size, *self.row_shape), self.dtype)
        if self.is_text:
            batch[...] = b""
        batch[: len(indices)] = self.rows(indices)
        # Keras infers a batch's dtypes in the training process and refuses NumPy's text dtypes.
        if self.is_text and not _in_data_worker():
            return tf.constant(batch, tf.string)
        return batch

    def spec(self, size):
        dtype = tf.string if self.is_text else tf.as_dtype(self.dtype)
        return tf.TensorSpec((size, *self.row_shape), dtype)

    def _probe(self):
        try:
            row = np.asarray(self._source[np.zeros(1, np.int64)])
        except (TypeError, IndexError, KeyError, ValueError) as error:
            raise TypeError(
                f"{self.name} of type {type(self._source).__name__} cannot be indexed with an "
                "integer array, as a NumPy array can (source[np.array([5, 8])]). Convert it with "
                "numpy.asarray, or give it such a __getitem__."
            ) from error
        if row.shape[:1] != (1,):
            raise ValueError(
                f"{self.name}[np.array([0])] must be one row, of shape (1, ...). "
                f"Received: shape {row.shape}."
            )
        if row.dtype == object and not all(isinstance(v, (str, bytes)) for v in row.flat):
            raise TypeError(
                f"{self.name} has dtype object and its values are not text. Rows must all have "
                "one shape and one dtype: pad ragged rows, and convert with numpy.asarray."
            )
        return row


def _in_data_worker():
    """Whether Keras started this process to read batches: TensorFlow can hang in a forked one."""
    return multiprocessing.current_process().name.startswith("Keras_worker_")


def _random_access(source, name):
    """`source` itself if rows can be read from it by index, or the NumPy array it stands for."""
    is_stream = isinstance(source, (tf.data.Dataset, keras.utils.PyDataset, Iterator))
    if isinstance(source, (tf.RaggedTensor, tf.SparseTensor)) or hasattr(source, "tocoo"):
        raise TypeError(
            f"{name} of type {type(source).__name__} is ragged or sparse; rows of one shape are "
            "needed. Convert it to a dense NumPy array."
        )
    if isinstance(source, (tf.Tensor, tf.Variable)):
        return source.numpy()
    if hasattr(source, "iloc"):  # pandas indexes by label, not by position
        return source.to_numpy()
    if is_stream or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise TypeError(
            f"{name} of type {type(source).__name__} cannot be read at any place in any order, "
            "which Poisson sampling needs: amplification by sampling is only proved for batches "
            "that draw each example independently. Pass NumPy arrays, memory maps, tensors or "
            "any object with __len__ and a __getitem__ that takes an integer array, or "
            "dicts, lists and tuples of them. To train on a stream, give it to `fit` as shuffled "
            "batches of fixed size, and account for it with "
            'keras_dp.callbacks.EpsilonLogger(num_examples=..., sampling="shuffle", delta=...), '
            "which claims no amplification."
        )
    return source


def _length(source, name):
    try:
        return len(source)
    except TypeError as error:
        raise TypeError(
            f"{name} has no length ({error}). Pass an array with one row per example."
        ) from error


class _WeightColumn:
    """The sample weights of one output, or weights of 1; no example weighs -0.0."""

    def __init__(self, source, name):
        self._column = None if source is None else _Column(source, name)
        if source is not None and self._column.dtype.kind not in "biuf":
            raise TypeError(f"{name} must hold numbers. Received: dtype {self._column.dtype}.")
        self.name = name
        self.length = None if source is None else self._column.length
        self.row_shape = () if source is None else self._column.row_shape

    def take(self, indices, size, factor):
        """Weights times `factor` `[len(indices)]`, then padding, `[size, *row_shape]`, float32."""
        weights = np.ones(len(indices), np.float32)
        if self._column is not None:
            weights = self._column.rows(indices).astype(np.float32)
        factor = factor.reshape(-1, *[1] * len(self.row_shape))
        batch = np.full((size, *self.row_shape), PADDING_WEIGHT, np.float32)
        batch[: len(indices)] = weights * factor + np.float32(0)  # -0.0 + 0.0 is 0.0
        return batch

    def spec(self, size):
        return tf.TensorSpec((size, *self.row_shape), tf.float32)


def _columns(structure, name, column=_Column):
    """The structure with a column for each array; tuples for lists, which tf.data would stack."""
    columns = [
        column(leaf, "".join([name, *(f"[{key!r}]" for key in path)]))
        for path, leaf in tree.flatten_with_path(structure)
    ]
    if not columns:
        raise ValueError(f"{name} holds no array. Received: {structure!r}.")
    return tree.lists_to_tuples(tree.pack_sequence_as(structure, columns))


def _checked_int(value, name, minimum):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int >= {minimum}. Received: {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be an int >= {minimum}. Received: {value}.")
    return int(value)


class PoissonSampler(keras.utils.PyDataset):
    """Poisson batches of a data set, for `model.fit(sampler)`.

    Each batch is a fresh draw in which every one of the N examples takes part independently with
    probability q = batch_size / N, which is the sampling that amplification is proved for (Abadi
    et al. 2016, arXiv 1607.00133; Mironov et al. 2019, arXiv 1908.10530). A batch holds
    `batch_size` examples on average, and may hold any number from none to N. What is protected is
    one row of the data: the neighbouring relation is adding or removing one example. q counts as
    a public number; it is not recomputed for the neighbouring data set.

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

    Every call of `sampler[index]` is a new draw, whatever the index, the epoch, the thread or the
    process: nothing that Keras does (reading batches ahead, looking at the first ones for their
    shape, stopping early, fitting again) uses one draw for two updates. Do not do so by hand: an
    update must not see a batch that was kept from before. The random numbers come from Philox
    with a 128-bit secret of the operating system. A copy of a sampler (pickled, `copy.deepcopy`,
    a worker process) draws with a secret of its own; the secret is neither pickled nor shown.

    Args:
      x: array `[N, ...]`, or a dict, list or tuple of them. Any object will do that has
        `__len__` and a `__getitem__` that takes an int array (memory maps and HDF5 data sets are
        read row by row); tensors and pandas data are converted once. Dtypes are kept. Text
        arrives as string tensors.
      y: as `x`; targets. None if the model needs none.
      sample_weight: array `[N]` or `[N, ...]`, or one for each output in the structure of `y`.
      batch_size: int in [1, N], the expected number of examples in a batch. The same number as
        the DP optimizer's.
      steps_per_epoch: int, draws in an epoch. Defaults to ceil(N / batch_size).
      seed: None draws the secret from the operating system. A fixed int is for tests: whoever
        knows it knows every batch, and each run repeats them; a warning says so.
      capacity: int >= 1, rows of a padded batch. By default the smallest multiple of 8 that at
        most one draw in 1e9 exceeds, and never more than N.
      class_weight: dict from class to factor on the sample weight, for one output with integer or
        one-hot labels; 1 for classes not in it. (`fit` refuses its own `class_weight` beside
        sample weights.) Factors count as public: those computed from the data are not private.
      **kwargs: `workers`, `use_multiprocessing`, `max_queue_size` of `keras.utils.PyDataset`.

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
        class_weight=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self._x = _columns(x, "x")
        self._y = () if y is None else _columns(y, "y")
        self._sample_weight = self._weight_columns(sample_weight)
        self._num_examples = self._common_length()
        self._batch_size = _checked_int(batch_size, "batch_size", 1)
        if self._batch_size > self._num_examples:
            raise ValueError(
                f"batch_size={batch_size} is larger than the data set of {self._num_examples} "
                "examples. Each example is drawn with probability batch_size / N, so batch_size "
                f"must be at most N: pass batch_size <= {self._num_examples}."
            )
        if steps_per_epoch is None:
            steps_per_epoch = -(-self._num_examples // self._batch_size)
        self._steps_per_epoch = _checked_int(steps_per_epoch, "steps_per_epoch", 1)
        if capacity is None:
            capacity = default_capacity(self._num_examples, self.sampling_probability)
        self._capacity = _checked_int(capacity, "capacity", 1)
        self._class_weight = self._checked_class_weight(class_weight)
        self._seeded = seed is not None
        if self._seeded:
            seed = _checked_int(seed, "seed", 0)
            warnings.warn(
                "PoissonSampler got a fixed seed: its batches can be predicted and every run "
                "repeats them, so no privacy can be claimed. Use a seed in tests only, and "
                "seed=None to train. (Worker processes ignore it and draw unpredictably.)",
                stacklevel=2,
            )
        self._draws = _Draws(seed)

    @property
    def num_examples(self):
        """N, the number of examples that are drawn from."""
        return self._num_examples

    @property
    def batch_size(self):
        """Expected number of examples in a batch."""
        return self._batch_size

    @property
    def sampling_probability(self):
        """q = batch_size / N, with which each example enters a batch."""
        return self._batch_size / self._num_examples

    @property
    def capacity(self):
        """Rows of a padded batch; a draw that exceeds it is padded to a multiple of it."""
        return self._capacity

    @property
    def batches_drawn(self):
        """How many batches this object has handed out in this process, used or not."""
        return self._own_draws().count

    def __len__(self):
        return self._steps_per_epoch

    def __getitem__(self, index):
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}). Received: {index}.")
        return self._gather(self._draw(index))

    def as_tf_dataset(self, *, endless=False):
        """The same batches as a `tf.data.Dataset` with a static batch dimension of `capacity`.

        For TPUs, and wherever XLA must know every shape. Each iteration over it draws afresh.
        `repeat()` and `prefetch()` keep that; `cache()`, `snapshot()` and `save()` would use
        batches again, and `shard()`, or auto-sharding over several workers, would give each
        worker batches of its own: none of these is Poisson sampling.

        Args:
          endless: False for the `len(self)` batches of one epoch, so that `fit(dataset,
            epochs=e)` does as many updates as `fit(sampler, epochs=e)`; True for batches without
            end (give `fit` its `steps_per_epoch`).

        Returns:
          `tf.data.Dataset` of `(x, y, sample_weight)`, `[capacity, ...]` each.

        Raises:
          ValueError: a draw exceeds `capacity` with a probability above 1e-9.
          PrivacyError: while iterating, when a draw exceeds `capacity` all the same: it does not
            fit the static shape, and to cut it would change the sampling that is accounted for.
        """
        excess = binom.sf(self.capacity, self.num_examples, self.sampling_probability)
        if excess > OVERFLOW_PROBABILITY:
            needed = default_capacity(self.num_examples, self.sampling_probability)
            raise ValueError(
                f"capacity={self.capacity} is too small for a static batch: a draw exceeds it "
                f"with probability {excess:.1e}, allowed is {OVERFLOW_PROBABILITY:.0e}. Pass "
                f"capacity={needed} or more to PoissonSampler, or leave it out."
            )

        def batches():
            epochs = itertools.count() if endless else range(1)
            for _ in epochs:
                for index in range(len(self)):
                    indices = self._draw(index)
                    if len(indices) > self.capacity:
                        raise PrivacyError(
                            f"A draw of {len(indices)} examples exceeds the static "
                            f"capacity={self.capacity}. Start again with a larger capacity, "
                            "or give `fit` the sampler itself, which takes draws of any size."
                        )
                    yield self._gather(indices)

        signature = tree.map_structure(
            lambda column: column.spec(self.capacity), (self._x, self._y, self._sample_weight)
        )
        dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
        length = tf.data.INFINITE_CARDINALITY if endless else len(self)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
        return dataset.prefetch(tf.data.AUTOTUNE)

    def __repr__(self):
        return (
            f"PoissonSampler(num_examples={self.num_examples}, batch_size={self.batch_size}, "
            f"sampling_probability={self.sampling_probability:.6g}, "
            f"steps_per_epoch={len(self)}, capacity={self.capacity}, seeded={self._seeded})"
        )

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["_draws"]
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._seeded = False
        self._draws = _Draws()

    def _own_draws(self):
        # A forked child shares its parent's secret and counts until it takes its own.
        draws = self._draws
        if draws.process is not _Process.current:
            self._seeded = False
            draws = self._draws = _Draws()
        return draws

    def _draw(self, index):
        generator = self._own_draws().next_generator(index)
        return poisson_indices(generator, self.num_examples, self.sampling_probability)

    def _gather(self, indices):
        size = self.capacity * max(1, -(-len(indices) // self.capacity))
        x, y = tree.map_structure(lambda column: column.take(indices, size), (self._x, self._y))
        factor = self._class_factor(indices)
        weight = tree.map_structure(
            lambda column: column.take(indices, size, factor), self._sample_weight
        )
        return x, y, weight

    def _class_factor(self, indices):
        if self._class_weight is None:
            return np.ones(len(indices), np.float32)
        labels = self._y.rows(indices)
        if self._y.row_shape not in ((), (1,)):
            labels = np.argmax(labels, axis=-1)
        classes, which = np.unique(np.round(labels.reshape(-1)), return_inverse=True)
        factors = [self._class_weight.get(int(label), 1.0) for label in classes]
        return np.array(factors, np.float32)[which]

    def _weight_columns(self, sample_weight):
        weights = _columns(sample_weight, "sample_weight", _WeightColumn)
        if tree.is_nested(weights):
            try:
                tree.assert_same_structure(self._y, weights)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    "sample_weight must be one array, or have the structure of y with one array "
                    "(or None) for each output. Received: "
                    f"sample_weight={tree.map_structure(lambda column: column.name, weights)} "
                    f"for y={tree.map_structure(lambda column: column.name, self._y)}."
                ) from error
        return weights

    def _checked_class_weight(self, class_weight):
        if class_weight is None:
            return None
        is_labels = isinstance(self._y, _Column) and not self._y.is_text
        if not is_labels or len(self._y.row_shape) > 1:
            raise ValueError(
                "class_weight needs y to be one array of integer labels [N] or [N, 1], or one-hot "
                "labels [N, classes]. Received: "
                f"y={tree.map_structure(lambda column: column.name, self._y)}. Put the factors "
                "into sample_weight instead."
            )
        if not isinstance(class_weight, Mapping):
            raise TypeError(
                f"class_weight must be a dict from class to weight. Received: {class_weight!r}."
            )
        weights = {}
        for label, weight in class_weight.items():
            label = _checked_int(label, "each class in class_weight", 0)
            if not isinstance(weight, numbers.Real) or not 0 <= weight < math.inf:
                raise ValueError(
                    "each weight in class_weight must be a finite number >= 0. "
                    f"Received: {weight!r} for class {label}."
                )
            weights[label] = float(weight)
        return weights

    def _common_length(self):
        columns = tree.flatten((self._x, self._y, self._sample_weight))
        first = columns[0]
        for column in columns:
            if column.length not in (None, first.length):
                raise ValueError(
                    f"All arrays must have one row per example. Received: {first.name} of length "
                    f"{first.length} and {column.name} of length {column.length}."
                )
        return first.length
