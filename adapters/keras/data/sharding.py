"""Assigns each rank its share of the data, with equally many batches, so that no rank waits for another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np

from sirtaki.bindings.context import Context, add_survivor, current, find, is_elastic
from sirtaki.keras._private import functions_of, inputs_of, is_evaluation, keep_order_of

_SHUFFLED = (
    "the batches are not read in their order, so nobody knows which of them are left when the ranks change: "
    "call fit(..., shuffle=False); hvd.shard_arrays() and hvd.shard() shuffle the samples themselves"
)

Uneven = Literal["pad", "drop", "keep"]


class Deal:
    """The distribution of an epoch's units (samples or batches) over the ranks.

    In each batch all ranks together take the next units of the epoch's order. So its state is the epoch, and
    the number of units that have been taken; the others can be dealt to any number of ranks. A batch keeps
    its number in the epoch: when the rest of an epoch is dealt, the first numbers stand for nothing.

    Attributes:
        batches: the number of batches in an epoch, for this number of ranks.
        skipped: the first batch with units that are not done.
    """

    def __init__(
        self, count: int, what: str, batch_size: int, shuffle: bool, seed: int, uneven: Uneven
    ) -> None:
        """Deals the first epoch.

        Raises:
            ValueError: an unknown `uneven`, or fewer units than ranks; `what` names them.
        """
        if uneven not in ("pad", "drop", "keep"):
            raise ValueError(f"uneven is {uneven!r}, but it has to be 'pad', 'drop' or 'keep'")
        self._count, self._what, self._batch_size = count, what, batch_size
        self._shuffle, self._seed, self._uneven = shuffle, seed, uneven
        self.epoch = 0
        self._done = 0  # units that were done when this rest was dealt
        self._taken = 0  # batches of this rest that have been done since
        self.deal(current())

    def deal(self, context: Context) -> None:
        """Deals what is left of the epoch to the ranks of a world."""
        if self._count < context.size:
            raise ValueError(
                f"there are {self._count} {self._what} for {context.size} ranks: each needs at least one"
            )
        self._done, self._taken = self.done, 0
        self._rank, self._size = context.rank, context.size
        order = np.arange(self._count)
        if self._shuffle:
            np.random.default_rng((self._seed, self.epoch)).shuffle(order)
        whole, self._own = self._share(order, order), self._share(order[self._done :], order)
        self._filler = whole[: self._batch_size]
        self.batches = -(-len(whole) // self._batch_size)
        self.skipped = self.batches - -(-len(self._own) // self._batch_size)

    def _share(self, units: Any, order: Any) -> Any:
        if self._uneven == "pad":
            units = np.concatenate([units, order[: -len(units) % self._size]])
        elif self._uneven == "drop":
            units = units[: len(units) - len(units) % self._size]
        return units[self._rank :: self._size]

    def units(self, index: int) -> Any:
        """Returns the numbers of the units in this rank's batch `index`; of a skipped batch, any."""
        first = (index - self.skipped) * self._batch_size
        return self._own[first : first + self._batch_size] if first >= 0 else self._filler

    @property
    def done(self) -> int:
        """Returns the number of units that the ranks have done in this epoch."""
        if not self._taken:
            return self._done
        return min(self._done + self._taken * self._batch_size * self._size, self._count)

    def record(self, batches: int) -> None:
        """Records that all ranks have done the epoch's first `batches` batches."""
        self._taken = max(batches - self.skipped, 0)

    def resize(self, count: int) -> None:
        """Sets the number of units, from the next epoch on."""
        self._count = count

    def start_epoch(self, epoch: int, done: int = 0) -> None:
        """Deals another epoch, of which a number of units may have been done.

        Between two worlds, that waits for the next one.
        """
        self.epoch, self._done, self._taken = epoch, done, 0
        context = find()
        if context is not None:
            self.deal(context)


class DatasetShare(keras.utils.PyDataset):
    """A rank's share of a dataset, which continues within an epoch if a state of an elastic job has it.

    Without such a state it starts from its first epoch when the ranks change, which is the same on all ranks.
    """

    def __init__(self, deal: Deal) -> None:
        super().__init__()
        self._deal = deal
        self._is_in_state = False
        self._is_counted = False  # whether a callback records batches and epochs, instead of Keras
        self._next: set[int] = set()  # the batches that may be read next, besides the first
        if is_elastic():
            add_survivor(self)
            keep_order_of(DatasetShare)

    def __len__(self) -> int:
        return self._deal.batches

    @property
    def skipped(self) -> int:
        """Returns the number of the epoch's first batch that has not been done by other ranks."""
        return self._deal.skipped

    def count(self) -> None:
        """Leaves it to the caller to record batches and epochs. They are then read in their order only."""
        self._is_counted = True
        self._next.clear()

    def _units(self, index: int) -> Any:
        """Returns the numbers of the units in batch `index`.

        Raises:
            ValueError: batches are recorded, and are not read in their order.
        """
        if self._is_counted:  # Keras may have several iterators at a time
            if index and index not in self._next:
                raise ValueError(_SHUFFLED)
            self._next.discard(index)
            self._next.add(index + 1)
        return self._deal.units(index)

    def record(self, batches: int) -> None:
        """Records that all ranks have been trained on the epoch's first `batches` batches."""
        self._deal.record(batches)

    def finish_epoch(self) -> None:
        """Begins the next epoch."""
        self._deal.start_epoch(self._deal.epoch + 1)

    def on_epoch_end(self) -> None:
        """Begins the next epoch, unless a callback does that.

        An evaluation or a prediction begins none: one rank may make it alone, and its later epochs would
        overlap with those of other ranks.
        """
        if not self._is_counted and not is_evaluation():
            self.finish_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and how many of its samples (or batches) the ranks have done."""
        self._is_in_state = True
        return {"epoch": self._deal.epoch, "done": self._deal.done, "is_counted": self._is_counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the ranks were, with what is left of the epoch. All ranks must call it."""
        self._is_counted = state["is_counted"]
        self._deal.start_epoch(state["epoch"], state["done"])

    def move_to(self, context: Context) -> None:
        """Deals the rest of the epoch to the ranks of another world."""
        if not self._is_in_state:
            self._is_counted = False
            self._deal.epoch = self._deal._done = self._deal._taken = 0
        self._deal.deal(context)

    def retire(self) -> None:
        """Does nothing: no other object refers to the world's number of ranks."""


# ---- Shares of datasets and of arrays ------------------------------------------------------------------


def shard(dataset: Any, *, shuffle: bool = True, seed: int = 0, buffer_size: int = 10_000) -> Any:
    """Returns this rank's share of a dataset, of the same length on every rank.

    Elements that do not divide evenly are left out: fewer than the number of ranks.

    `on_epoch_end` of a PyDataset is called as often as Keras does in `fit`, but not in an evaluation, a
    prediction or a validation: these may be made by one rank alone, where another order would then begin.

    Args:
        dataset: a tf.data.Dataset, the same on all ranks and in the same order, of samples or of batches; or
            a keras.utils.PyDataset of batches, the same on all ranks, of which each rank takes every size-th.
            It must not have been shuffled: each rank would take its part of a different order.
        shuffle: whether each epoch has a different order. A PyDataset's batches are redistributed as well; of
            a tf.data.Dataset each rank shuffles its fixed share.
        seed: the seed of the order.
        buffer_size: the size of the shuffle buffer of a tf.data.Dataset, in elements.

    Returns:
        A dataset of the same kind. Batch and prefetch a tf.data.Dataset of samples afterwards.

    Raises:
        TypeError: another kind of dataset; use `shard_arrays` for arrays.
        ValueError: there is less than one element per rank, or the dataset's order differs between ranks.
        NotInitializedError: init() has not been called.

    Example:
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices((inputs, targets))
        batches = hvd.shard(dataset).batch(4).prefetch(1)  # on 2 ranks: 8 of the 16 samples on each
    """
    if isinstance(dataset, keras.utils.PyDataset):
        return _ShardOfBatches(dataset, shuffle, seed)
    if "tensorflow" in sys.modules and isinstance(dataset, sys.modules["tensorflow"].data.Dataset):
        _refuse_other_orders(dataset)
        part = _shard_of_elements(dataset)
        return part.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=True) if shuffle else part
    raise TypeError(
        f"shard() takes a tf.data.Dataset or a keras.utils.PyDataset, not {type(dataset).__name__}; for "
        "arrays there is shard_arrays(x, y)"
    )


def shard_arrays(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int = 32,
    shuffle: bool = True,
    seed: int = 0,
    uneven: Uneven = "pad",
) -> Any:
    """Returns this rank's share of samples in arrays, as batches for `fit`, redistributed in each epoch.

    Args:
        x: an array of samples along dimension 0, or a list or dictionary of such, the same on all ranks.
        y: the targets, likewise; None if there are none.
        sample_weight: a weight for each sample; None if there are none.
        batch_size: samples per rank and batch; the last batch of an epoch may have fewer.
        shuffle: whether the samples are distributed in a different order in each epoch.
        seed: the seed of the order; the same on all ranks.
        uneven: the treatment of samples that do not divide evenly. "pad": some are repeated in an epoch.
            "drop": some are left out in it. "keep": some ranks have one more, which is right for `evaluate`
            and validation, where ranks need not have the same number of batches; in training a rank could
            wait.

    In an elastic job, give the dataset to the state, as `hvd.elastic.KerasState(model, data=dataset)`: an
    epoch in which the ranks change then continues with the samples that are left. `fit` reads the batches in
    their order there, also without shuffle=False.

    Returns:
        A keras.utils.PyDataset, which works with every backend.

    Raises:
        ValueError: arrays of different lengths, fewer samples than ranks, or an unknown `uneven`.
        NotInitializedError: init() has not been called.

    Example:
        batches = hvd.shard_arrays(inputs, targets, batch_size=4)  # on 2 ranks: 8 of the 16 samples on each
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        model.fit(batches, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """
    return _ShardOfSamples(
        (x, y, sample_weight), lambda count: Deal(count, "samples", batch_size, shuffle, seed, uneven)
    )


class _ShardOfSamples(DatasetShare):
    """Batches of this rank's samples."""

    def __init__(self, parts: Sequence[Any], deal: Callable[[int], Deal]) -> None:
        self._parts = [_mapped(part, np.asarray) for part in parts]
        lengths = {len(array) for part in self._parts for array in _arrays(part)}
        if len(lengths) != 1:
            raise ValueError(f"the arrays have {sorted(lengths)} samples, but they have to have as many")
        super().__init__(deal(lengths.pop()))

    def __getitem__(self, index: int) -> Any:
        rows = self._units(index)
        x, y, weight = (_mapped(part, lambda array: _in_floatx(array[rows])) for part in self._parts)
        if weight is not None:
            return x, y, weight
        return (x,) if y is None else (x, y)


def _in_floatx(array: Any) -> Any:
    """Returns an array with floats in Keras' dtype, as `fit` has them in batches of arrays."""
    return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array


class _ShardOfBatches(DatasetShare):
    """This rank's batches of another dataset."""

    def __init__(self, dataset: Any, shuffle: bool, seed: int) -> None:
        super().__init__(Deal(len(dataset), "batches", 1, shuffle, seed, "drop"))
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._units(index)[0])]

    def on_epoch_end(self) -> None:
        if not is_evaluation():  # by it, the dataset may get another order on this rank
            self._dataset.on_epoch_end()
        super().on_epoch_end()

    def finish_epoch(self) -> None:
        self._deal.resize(len(self._dataset))
        super().finish_epoch()


def _refuse_other_orders(dataset: Any) -> None:
    """Raises ValueError if a tf.data.Dataset, or any of its inputs, has a different order on each rank.

    TensorFlow keeps a dataset's inputs in attributes that are not public; without them nothing is found.
    """
    cause = ""
    if dataset.options().deterministic is False:
        cause = "has the option deterministic=False"
    pending = [dataset]
    while pending and not cause:
        value = pending.pop()
        if "Shuffle" in type(value).__name__ or any(map(_shuffles, functions_of(value))):
            cause = "has been shuffled"
        elif getattr(value, "_deterministic", None) == "false":
            cause = "is made with deterministic=False"
        pending += inputs_of(value)
    if cause:
        raise ValueError(
            f"the dataset given to shard() {cause}, so its order differs between ranks: they would train on "
            "some samples together and on others never. Shard first and shuffle afterwards: "
            "hvd.shard(dataset) shuffles this rank's part, and so does "
            "hvd.shard(dataset, shuffle=False).shuffle(buffer_size); for files, write "
            "tf.data.Dataset.list_files(pattern, shuffle=False)"
        )


def _shuffles(function: Any) -> bool:
    """Returns whether the function of a `flat_map`, an `interleave` or the like makes a shuffled dataset."""
    graph = getattr(getattr(function, "function", None), "graph", None)
    return graph is not None and any(
        operation.type.startswith("Shuffle") for operation in graph.get_operations()
    )


def _mapped(part: Any, change: Any) -> Any:
    """Returns the arrays of a nested structure, changed; None stays None."""
    return None if part is None else keras.tree.map_structure(change, part)


def _arrays(part: Any) -> list[Any]:
    return [] if part is None else keras.tree.flatten(part)


def _shard_of_elements(dataset: Any) -> Any:
    """Selects elements rank, rank + size, ... of a tf.data.Dataset, equally many on all ranks.

    In an elastic job they are those of the rank in the world in which the dataset is iterated over. Its
    cardinality is unknown then, because it depends on the number of ranks.
    """
    size, rank, follows = current().size, current().rank, is_elastic()
    tensorflow = sys.modules["tensorflow"]
    count = int(dataset.cardinality())
    if size == 1 and not follows:
        return dataset
    if 0 <= count < size:
        raise ValueError(f"there are {count} elements for {size} ranks: each needs at least one")
    if not follows:
        return _part_of(dataset, count, size, rank)
    from sirtaki.tensorflow.ops.topology_ops import rank_op, size_op  # only with data of TensorFlow

    def own(_: Any) -> Any:
        present = (tensorflow.cast(item, tensorflow.int64) for item in (size_op(), rank_op()))
        return _part_of(dataset, count, *present)

    return tensorflow.data.Dataset.range(1).flat_map(own)


def _part_of(dataset: Any, count: int, size: Any, rank: Any) -> Any:
    """Returns the elements of a rank of so many, of a tf.data.Dataset with the cardinality `count`."""
    tensorflow = sys.modules["tensorflow"]
    if count == tensorflow.data.INFINITE_CARDINALITY:
        return dataset.shard(size, rank)
    if count >= 0:
        return dataset.shard(size, rank).take(count // size)

    def own(*parts: Any) -> Any:
        window = tensorflow.data.Dataset.zip(parts[0] if len(parts) == 1 else parts)
        return window.skip(rank).take(1)

    return dataset.window(size, drop_remainder=True).flat_map(own)  # of unknown length: full rounds only
