"""Distribution of the data over the ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import keras
import numpy as np
import pytest

import sirtaki.keras as hvd
from cases import case
from cases.keras_models import assert_alike, make_model


def drawn(dataset: Any) -> list[int]:
    """Returns the samples of an epoch."""
    found = [int(sample) for index in range(len(dataset)) for sample in dataset[index][0]]
    dataset.on_epoch_end()
    return found


def of_all(own: list[int]) -> list[int]:
    return hvd.allgather(np.array(own, np.int64)).tolist()


@case(uneven=["pad", "drop", "keep"])
def samples_dealt_out(uneven: Any) -> None:
    size, count = hvd.size(), 11 * hvd.size() + 1
    dataset = hvd.shard_arrays(np.arange(count), batch_size=3, uneven=uneven)
    first, second = drawn(dataset), drawn(dataset)
    together = of_all(first)
    if uneven == "keep":
        assert sorted(together) == list(range(count))
    elif uneven == "drop":
        assert len(first) == 11
        assert len(set(together)) == 11 * size
    else:
        assert len(first) == -(-count // size)
        assert set(together) == set(range(count))
    assert first != second
    assert len(hvd.shard_arrays(np.arange(count), batch_size=3, uneven="drop")) == 4


class Rows(keras.utils.PyDataset):
    """A user-defined data set of batches of one row, in another order in each epoch."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows, self.epochs = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[(index + self.epochs) % len(self) :][:1]
        return row, row[:, :1]

    def on_epoch_end(self) -> None:
        self.epochs += 1


@case(kind=["arrays", "batches"], least=2)
def an_evaluation_by_one_rank(kind: str) -> None:
    """The rank's later epochs are still those of the other ranks."""
    rows = np.arange(18.0 * hvd.size()).reshape(-1, 3)
    dataset = hvd.shard_arrays(rows, rows[:, :1]) if kind == "arrays" else hvd.shard(Rows(rows))
    model = make_model()
    model.compile("sgd", "mse", run_eagerly=True)

    def seen() -> list[int]:
        return sorted(of_all([int(row[0]) for index in range(len(dataset)) for row in dataset[index][0]]))

    model.fit(dataset, verbose=0)
    first = dataset[0][0].tolist()
    if hvd.is_root():
        model.evaluate(dataset, verbose=0)
        model.predict(dataset, verbose=0)
    assert seen() == rows[:, 0].astype(int).tolist()
    model.fit(dataset, validation_data=dataset, verbose=0)
    assert seen() == rows[:, 0].astype(int).tolist()
    assert dataset[0][0].tolist() != first or kind == "batches"


@case()
def the_end_of_an_epoch_of_batches() -> None:
    """The dataset below learns of those of `fit`: by others it might get another order on this rank."""
    rows = np.arange(18.0 * hvd.size()).reshape(-1, 3)
    data = Rows(rows)
    model = make_model()
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(hvd.shard(data), epochs=2, verbose=0)
    ends = data.epochs
    assert ends >= 2  # Keras adds one at the start
    model.evaluate(hvd.shard(data), verbose=0)
    model.predict(hvd.shard(data), verbose=0)
    model.fit(hvd.shard_arrays(rows, rows[:, :1]), verbose=0, validation_data=hvd.shard(data))
    assert data.epochs == ends


@case()
def datasets_in_another_order_on_each_rank() -> None:
    """Such data sets are rejected, wherever the order arises: the ranks' parts would overlap."""
    if importlib.util.find_spec("tensorflow") is None:
        return
    import tensorflow as tf

    numbers = tf.data.Dataset.range(8 * hvd.size())
    unordered = tf.data.Options()
    unordered.deterministic = False
    made = {
        "has been shuffled": [
            numbers.shuffle(8),
            numbers.shuffle(8, seed=1).map(lambda one: one + 1).batch(2).prefetch(1),
            tf.data.Dataset.zip((numbers, numbers.shuffle(8))),
            numbers.batch(4).flat_map(lambda part: tf.data.Dataset.from_tensor_slices(part).shuffle(4)),
        ],
        "deterministic=False": [
            numbers.with_options(unordered),
            numbers.map(lambda one: one, num_parallel_calls=2, deterministic=False).batch(2),
        ],
    }
    for cause, datasets in made.items():
        for dataset in datasets:
            with pytest.raises(ValueError, match=f"{cause}.*hvd.shard\\(dataset\\) shuffles"):
                hvd.shard(dataset)
    part = hvd.shard(numbers.map(lambda one: one, num_parallel_calls=2), shuffle=False).shuffle(8)
    mine = [int(one) for one in part]
    assert sorted(of_all(mine)) == list(range(8 * hvd.size()))


@case()
def whatever_a_sample_has() -> None:
    x = {"a": np.arange(8), "b": np.arange(16).reshape(8, 2)}
    y, weight = np.arange(8) * 2, np.arange(8) * 3
    dataset = hvd.shard_arrays(x, y, weight, batch_size=2, shuffle=False)
    inputs, targets, weights = dataset[0]
    own = np.arange(8)[hvd.rank() :: hvd.size()][:2]
    np.testing.assert_array_equal(inputs["a"], own)
    np.testing.assert_array_equal(inputs["b"], x["b"][own])
    np.testing.assert_array_equal(targets, own * 2)
    np.testing.assert_array_equal(weights, own * 3)
    assert len(hvd.shard_arrays(y)[0]) == 1
    assert len(hvd.shard_arrays(y, y)[0]) == 2


@case()
def too_little_or_of_a_wrong_kind() -> None:
    with pytest.raises(ValueError, match="there are 0 samples"):
        hvd.shard_arrays(np.zeros(0))
    with pytest.raises(ValueError, match=r"have \[3, 4\] samples"):
        hvd.shard_arrays(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="uneven is 'join'"):
        hvd.shard_arrays(np.zeros(3), uneven="join")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="for arrays there is shard_arrays"):
        hvd.shard(np.zeros(3))


class Batches(keras.utils.PyDataset):
    """A user-defined data set of seven batches."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return (np.array([2 * index, 2 * index + 1]),)


@case()
def batches_dealt_out() -> None:
    dataset = hvd.shard(Batches())
    first, second = drawn(dataset), drawn(dataset)
    assert len(dataset) == 7 // hvd.size()
    assert len(set(of_all(first))) == 14 // (2 * hvd.size()) * 2 * hvd.size()
    assert first != second or hvd.size() > 3
    fixed = hvd.shard(Batches(), shuffle=False)
    assert drawn(fixed)[:2] == [2 * hvd.rank(), 2 * hvd.rank() + 1]


@case()
def training_with_uneven_data() -> None:
    """All ranks reach the end of each epoch, with equal weights."""
    count = 5 * hvd.size() + 1
    x = np.random.default_rng(0).normal(size=(count, 3))
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
    model.fit(hvd.shard_arrays(x, x[:, :1], batch_size=2), epochs=2, verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 6
    assert_alike(model.weights)


@case(kind=["known", "unknown", "ragged", "endless"])
def a_dataset_of_tensorflow(kind: str) -> None:
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    def is_small(one: Any) -> Any:
        return one < 7

    def with_as_many_zeros(one: Any) -> Any:
        return one, tf.zeros(one)

    size, rank = hvd.size(), hvd.rank()
    dataset = tf.data.Dataset.range(7)
    if kind == "unknown":
        dataset = dataset.filter(is_small)
    elif kind == "ragged":
        dataset = dataset.filter(is_small).map(with_as_many_zeros)
    elif kind == "endless":
        dataset = dataset.repeat()
    own = hvd.shard(dataset, shuffle=False).take(7 // size)
    found = [int(one[0] if kind == "ragged" else one) for one in own]
    assert found == [(rank + place * size) % 7 for place in range(7 // size)]
    if kind == "known" and size > 1:
        shuffled = hvd.shard(dataset)
        first, second = ([int(one) for one in shuffled] for _ in range(2))
        assert sorted(first) == sorted(second) == found
        with pytest.raises(ValueError, match="elements for"):
            hvd.shard(dataset.take(size - 1))
