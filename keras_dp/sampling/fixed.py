"""Fixed batches of a stream, with the guarantee that holds for them: no amplification."""

import itertools
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from keras_dp.errors import PrivacyError
from keras_dp.sampling.batches import Batches
from keras_dp.sampling.checks import checked_int
from keras_dp.sampling.examples import DataSet, Examples, as_keras_example, is_absent
from keras_dp.sampling.in_order import InOrder, refuse_workers
from keras_dp.sampling.sources import ItemSource


class FixedBatches(keras.utils.PyDataset):
    """Batches of fixed size of a stream that cannot be read at random, for `model.fit`.

        batches = keras_dp.FixedBatches(dataset, batch_size=256, num_examples=60_000)
        model.fit(batches, epochs=3,
                  callbacks=[keras_dp.callbacks.EpsilonLogger(batches, delta=1e-5)])

    The privacy is that of one participation of each example per pass, without amplification by
    sampling, however well the stream is shuffled; the neighbouring relation replaces one example
    by a null one, and N is public. For the same noise epsilon is much larger than with
    `PoissonSampler`: where the data fit on a disk, `keras_dp.write_array_record` makes them
    readable at random.

    Every pass over the stream is checked to give exactly `num_examples` examples: the accountant
    counts passes by it. The last batch of a pass is filled up with padding (sample weight -0.0,
    see `keras_dp.padding`), so that XLA compiles once and no example is dropped. Batches come in
    the order of the stream, whatever index is asked for.

    Args:
      stream: `tf.data.Dataset` of single examples (not batches), a function without arguments
        that returns an iterator over examples, or any object that can be iterated again and
        again. An example is x, (x,), (x, y) or (x, y, sample_weight), each an array, or a dict
        or tuple of arrays; all of one shape and dtype.
      batch_size: int in [1, num_examples], the same number as the DP optimizer's.
      num_examples: int >= 1, the examples in one pass.
      **kwargs: `max_queue_size` of `keras.utils.PyDataset`; one worker reads.

    Attributes:
      sampling: "shuffle", as `keras_dp.compute_epsilon` calls it.
      unit: "example".

    Raises:
      TypeError: an iterator, which can be read only once, or what is no stream.
      ValueError: numbers outside their range; while reading, examples that differ in shape.
      PrivacyError: while reading, when a pass has more or fewer examples than `num_examples`.
    """

    sampling = "shuffle"
    unit = "example"
    examples_per_user = None

    def __init__(self, stream, *, batch_size, num_examples, **kwargs):
        super().__init__(**kwargs)
        refuse_workers("FixedBatches", "has batches in the order of the stream", **kwargs)
        self._stream, self._specs = _checked_stream(stream), None
        self._num_examples = checked_int(num_examples, "num_examples", 1)
        self._batch_size = checked_int(batch_size, "batch_size", 1)
        if self._batch_size > self._num_examples:
            raise ValueError(
                f"batch_size={batch_size} is larger than the data set of {num_examples} examples. "
                f"Pass batch_size <= {num_examples}."
            )
        self._in_order = InOrder(self._endless)
        self._count = 0

    @property
    def num_examples(self):
        """N, the examples in one pass."""
        return self._num_examples

    @property
    def num_units(self):
        """The same number: each example is protected by itself."""
        return self._num_examples

    @property
    def batch_size(self):
        """Examples in a batch; fewer in the last one of a pass."""
        return self._batch_size

    @property
    def updates_drawn(self):
        """How many batches this object has handed out."""
        return self._count

    @property
    def batches_drawn(self):
        """The same number as `updates_drawn`."""
        return self._count

    @property
    def num_batches(self):
        """Batches in a pass. Keras asks whenever it begins to read, which begins a new pass."""
        self._in_order.begin()
        return len(self)

    def __len__(self):
        return -(-self._num_examples // self._batch_size)

    def __getitem__(self, index):
        return self._in_order.next()

    def __iter__(self):
        return self._one_pass()

    def __repr__(self):
        return f"FixedBatches(num_examples={self._num_examples}, batch_size={self._batch_size})"

    def _endless(self):
        while True:
            yield from self._one_pass()

    def _one_pass(self):
        groups, begun = self._groups(), 0
        while begun < self._num_examples:
            group = next(groups, None)
            begun += 0 if group is None else group.length
            is_last = begun >= self._num_examples
            if group is None or (group.length < self._batch_size and not is_last):
                raise self._wrong_number(f"only {begun}")
            if begun > self._num_examples or (is_last and next(groups, None) is not None):
                raise self._wrong_number("more")
            examples = Examples(group)
            self._check_like_the_first(examples.specs)
            self._count += 1
            rows = np.arange(group.length)
            yield Batches(examples).gather(rows, self._batch_size, draw=None)

    def _groups(self):
        """A `DataSet` of one batch after the other, of a new pass."""
        if isinstance(self._stream, tf.data.Dataset):  # stacks faster than Python
            for group in self._stream.batch(self._batch_size).as_numpy_iterator():
                x, y, weight = as_keras_example(group)
                yield DataSet(x, None if is_absent(y) else y, weight)
            return
        examples = iter(self._stream() if callable(self._stream) else self._stream)
        while group := list(itertools.islice(examples, self._batch_size)):
            yield DataSet(ItemSource(group, "x", group[0]))

    def _check_like_the_first(self, specs):
        self._specs = self._specs or specs
        if specs != self._specs:
            raise ValueError(
                "All examples of a stream must have one structure, shape and dtype. Received: "
                f"{specs}, the first had {self._specs}."
            )

    def _wrong_number(self, received):
        return PrivacyError(
            f"A pass over the stream gave {received} examples, but num_examples="
            f"{self._num_examples}: epsilon would be that of another number of passes. Give the "
            "exact number. A stream of batches must be unbatched first (dataset.unbatch()), an "
            "endless one must end after each pass (no repeat())."
        )


def _checked_stream(stream):
    """`stream`, if each pass can begin it anew."""
    if isinstance(stream, Iterator):
        raise TypeError(
            f"stream of type {type(stream).__name__} can be read only once, and training needs "
            "several passes. Pass the function that makes it: FixedBatches(make_examples, ...)."
        )
    if not (callable(stream) or hasattr(stream, "__iter__")):
        raise TypeError(
            f"stream of type {type(stream).__name__} cannot be iterated. Pass a tf.data.Dataset, "
            "a function that returns an iterator over examples, or an object with __iter__."
        )
    return stream
