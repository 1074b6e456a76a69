"""Assigns each rank its share of the data, with equally many batches, so that no rank waits for another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from sirtaki.bindings.context import current, is_elastic
from sirtaki.keras._private import functions_of, inputs_of, is_evaluation
from sirtaki.keras.data.shares import DatasetShare, Deal, Uneven


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
