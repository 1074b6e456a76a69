"""The batches of a training: read whole on every rank, of which each takes its rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np

from sirtaki import numpy as arrays
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.training.equal_values import Value
from sirtaki.common.training.shares import Share
from sirtaki.keras._private import adapter_of_arrays, convert_to_sliceable, samples_of
from sirtaki.keras.auto.refusals import require_equal_data
from sirtaki.numpy.consistency import checksum_of

_COMPARED = 1 << 26  # bytes of each array that are compared over the ranks before a training
_SAME_ARRAYS = (
    "every rank has to be given the same arrays: make random data from a seed, and load files in one order "
    "(sorted(os.listdir(...)))"
)
_SAME_BATCHES = (
    "every rank reads all the data and computes its rows, so the batches have to come in the same order on "
    "all ranks: seed the shuffle (dataset.shuffle(..., seed=1), keras.utils.set_random_seed(1) at the start "
    "of the script), and read files in sorted order"
)


class BatchPart(NamedTuple):
    """A rank's part of a batch, as `train_step` receives it.

    Attributes:
        batch: this rank's rows of (x, y, sample weight); of a batch with fewer rows than ranks, one row that
            does not count on the ranks that have none.
        own: the number of own rows.
        total: the number of rows of the whole batch.
    """

    batch: Any
    own: Any
    total: Any


class TrainingBatch(NamedTuple):
    """A batch that is about to be trained on.

    Attributes:
        total: the number of rows.
        rows: returns some of the rows of all that it consists of.
    """

    total: int
    rows: Callable[[slice], Any]


class BatchParts:
    """An iterator over this rank's parts of batches, which can look ahead."""

    def __init__(
        self, context: Context, batches: Iterator[TrainingBatch], end: Callable[[], Exception]
    ) -> None:
        """`end` makes the exception that ends the iteration."""
        self._context, self._batches, self._end = context, batches, end
        self._next: deque[TrainingBatch] = deque()
        self.last: TrainingBatch | None = None

    def __iter__(self) -> BatchParts:
        return self

    def __next__(self) -> BatchPart:
        if not self.ahead(1):
            raise self._end()
        self.last = self._next.popleft()
        return part_of(self._context, self.last)

    def ahead(self, count: int) -> list[TrainingBatch]:
        """Returns the next batches; fewer at the end."""
        while len(self._next) < count:
            batch = next(self._batches, None)
            if batch is None:
                break
            self._next.append(batch)
        return list(self._next)[:count]


def part_of(context: Context, batch: TrainingBatch) -> BatchPart:
    """Returns this rank's part of a batch."""
    share = Share(context, batch.total)
    rows = batch.rows(share.rows if share.count else slice(0, 1))
    counts: tuple[Any, ...] = share.count, share.total
    if keras.backend.backend() != "torch":  # a number would be compiled into the step
        counts = tuple(np.asarray(count, np.int32) for count in counts)
    return BatchPart(rows, *counts)


class SplitAdapter:
    """Makes the batches of `fit` in place of a data adapter of Keras, which reads them whole."""

    def __init__(self, context: Context, plain: Any, where: str) -> None:
        """`where` is the user's line that trains."""
        self._context, self._plain, self._where = context, plain, where
        self._is_of_arrays = isinstance(plain, adapter_of_arrays())
        if self._is_of_arrays:
            inputs = samples_of(plain)
            _require_equal_arrays(context, where, inputs)
            self._sliceable = convert_to_sliceable(inputs)
            # Gives the samples' numbers as `plain` gives the samples: in the same order, from the same seeds.
            self._numbers = type(plain)(
                np.arange(len(keras.tree.flatten(inputs)[0])),
                batch_size=plain.batch_size,
                shuffle=getattr(plain, "_shuffle", False),
            )
        self.parts: BatchParts | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __iter__(self) -> BatchParts:
        # An iterator of torch draws a random number when it is made, even if it is never used.
        native = _native(self._numbers if self._is_of_arrays else self._plain)
        batches = self._samples(native) if self._is_of_arrays else self._read(native)
        self.parts = BatchParts(self._context, batches, _end)
        return self.parts

    def _self(self) -> SplitAdapter:
        return self

    get_numpy_iterator = get_jax_iterator = get_torch_dataloader = get_tf_dataset = _self

    def _samples(self, native: Iterator[Any]) -> Iterator[TrainingBatch]:
        """Takes rank 0's order: the random states of the ranks need not be equal."""
        shuffle = getattr(self._plain, "_shuffle", False)
        batches: Iterator[Any] = (_one_array(batch) for batch in native)
        if shuffle != "batch":
            whole = list(batches)
            if shuffle:
                lengths = np.cumsum([len(batch) for batch in whole])[:-1]
                whole = np.split(self._of_rank_0(np.concatenate(whole)), lengths)
            batches = iter(whole)
        for numbers in batches:
            order = self._of_rank_0(numbers) if shuffle == "batch" else numbers
            yield TrainingBatch(len(order), partial(self._take, order))

    def _of_rank_0(self, numbers: Any) -> Any:
        return arrays.broadcast(np.ascontiguousarray(numbers), 0, name="sirtaki.auto.order")

    def _take(self, numbers: Any, rows: slice) -> Any:
        def taken(value: Any) -> Any:
            return None if value is None else _tensor(value.convert_to_numpy(value[numbers[rows]]))

        return keras.tree.map_structure(taken, self._sliceable)

    def _read(self, native: Iterator[Any]) -> Iterator[TrainingBatch]:
        """Reads whole batches; each is compared over the ranks."""
        number = 0
        for batch in native:
            refusal = _why_not_split(batch)
            values = [Value(f"batch {number}", "a batch"), *([] if refusal else _values(batch))]
            self._compare(values, refusal)
            total = next(len(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None)
            yield TrainingBatch(total, partial(_rows_of, batch))
            number += 1
        self._compare([Value(f"batch {number}", "the end of the data")], None)

    def _compare(self, values: list[Value], refusal: str | None) -> None:
        require_equal_data(self._context, "sirtaki.auto.batch", self._where, values, refusal, _SAME_BATCHES)


def _rows_of(batch: Any, rows: slice) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], batch)


def _native(adapter: Any) -> Iterator[Any]:
    """Returns an iterator over whole batches, in the type that the backend gets in a single process."""
    backend = keras.backend.backend()
    if backend == "torch":
        return iter(adapter.get_torch_dataloader())
    if backend == "tensorflow":
        return iter(adapter.get_tf_dataset())
    return iter(adapter.get_jax_iterator())


def _end() -> Exception:
    """Returns the exception at which Keras ends an epoch of unknown length."""
    if keras.backend.backend() != "tensorflow":
        return StopIteration()
    import tensorflow as tf

    return tf.errors.OutOfRangeError(None, None, "the end of the data")


def _one_array(batch: Any) -> Any:
    return np.asarray(keras.tree.flatten(batch)[0])


def _tensor(array: Any) -> Any:
    return keras.ops.convert_to_tensor(array) if keras.backend.backend() == "torch" else array


def _why_not_split(batch: Any) -> str | None:
    lengths = set()
    for leaf in keras.tree.flatten(batch):
        if leaf is None:
            continue
        shape = getattr(leaf, "shape", None)
        if shape is None or not len(shape):
            return f"a batch contains {leaf!r:.60}, which has no rows that could be divided over the ranks"
        if not hasattr(leaf, "__array__"):
            return f"a batch contains a {type(leaf).__name__}, whose rows cannot be divided over the ranks"
        lengths.add(int(shape[0]))
    if len(lengths) != 1 or 0 in lengths:
        return f"the arrays of a batch have {sorted(lengths)} rows, but they have to have equally many"
    return None


def _values(batch: Any) -> list[Value]:
    labelled = enumerate(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
    return [_value(f"array {place} of the batch", value) for place, value in labelled]


def _value(label: str, leaf: Any) -> Value:
    array = np.asarray(keras.ops.convert_to_numpy(leaf) if keras.ops.is_tensor(leaf) else leaf)
    kind = f"{array.dtype} of shape {list(array.shape)}"
    return Value(label, kind, checksum_of(np.ascontiguousarray(array)))


def _require_equal_arrays(context: Context, where: str, inputs: Any) -> None:
    """Raises UnsupportedError if ranks have different arrays; of large arrays, some rows are compared."""
    values = []
    leaves = [item for item in keras.tree.flatten(inputs) if item is not None]
    for place, leaf in enumerate(leaves):
        if not hasattr(leaf, "__array__"):
            raise UnsupportedError(
                f"{where}: argument {place} of fit is a {type(leaf).__name__}, whose rows cannot be divided "
                "over the ranks: give dense arrays"
            )
        rows = len(leaf)
        size = max(int(np.prod(leaf.shape[1:], dtype=np.int64)) * 8, 1)
        step = max(rows * size // _COMPARED, 1)
        sampled = leaf[:: int(step)] if step > 1 else leaf
        value = _value(f"array {place} of the training data", sampled)
        values.append(value._replace(kind=f"{value.kind} ({rows} rows in all)"))
    require_equal_data(context, "sirtaki.auto.arrays", where, values, None, _SAME_ARRAYS)
