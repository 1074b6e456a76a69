"""The result of each collective for TensorFlow's tensors, eagerly and in functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import sirtaki.tensorflow as hvd
from cases import case
from cases.warned import warnings_of_this_rank

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (70_001,)]
REDUCIBLE = [
    *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
]
MOVABLE = [*REDUCIBLE, tf.bool, tf.complex64, tf.complex128]
OPS = {"Sum": np.sum, "Average": np.mean, "Min": np.min, "Max": np.max, "Product": np.prod}


def values(rank: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns small integers, which every dtype holds exactly; their sums are divisible by up to 4 ranks."""
    numbers = np.arange(int(np.prod(shape))) * 5 + rank * 7
    return tf.cast((numbers % 2 * 12).reshape(shape), dtype)


def everyone(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns all ranks' values, as float64."""
    return np.stack([tf.cast(values(rank, shape, dtype), tf.float64) for rank in range(hvd.size())])


def same(actual: Any, expected: Any) -> None:
    expected = tf.convert_to_tensor(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert bool(tf.reduce_all(tf.equal(actual, expected)))


@case(op=OPS)
def allreduce(op: str) -> None:
    code, combine = getattr(hvd, op), OPS[op]
    combined = tf.function(
        lambda one: hvd.allreduce(one, op=code, name="in_a_function"), reduce_retracing=True
    )
    for dtype in REDUCIBLE:
        for shape in SHAPES:
            mine = values(hvd.rank(), shape, dtype)
            expected = tf.cast(combine(everyone(shape, dtype), axis=0), dtype)
            same(hvd.allreduce(mine, op=code), expected)
            same(mine, values(hvd.rank(), shape, dtype))
        same(combined(mine), expected)


@case()
def groups_of_every_dtype() -> None:
    mine = [values(hvd.rank(), (3, 2), dtype) for dtype in REDUCIBLE]
    expected = [tf.cast(everyone((3, 2), dtype).sum(0), dtype) for dtype in REDUCIBLE]
    in_a_function = tf.function(lambda: hvd.grouped_allreduce(mine, op=hvd.Sum))
    for results in (hvd.grouped_allreduce(mine, op=hvd.Sum), in_a_function(), in_a_function()):
        for result, wanted in zip(results, expected, strict=True):
            same(result, wanted)
    assert hvd.grouped_allreduce([]) == []


@case()
def bool_and_complex() -> None:
    same(hvd.allreduce(tf.constant([hvd.rank() == 0, True]), op=hvd.Min), [hvd.size() == 1, True])
    same(hvd.allreduce(tf.constant([1 + 2j]), op=hvd.Sum), tf.constant([1 + 2j]) * hvd.size())


@case()
def average_and_factors() -> None:
    mine = tf.fill([3], float(hvd.rank()))
    same(hvd.allreduce(mine), tf.fill([3], (hvd.size() - 1) / 2))
    with warnings_of_this_rank() as texts:
        same(hvd.allreduce(mine, average=False), tf.fill([3], hvd.size() * (hvd.size() - 1) / 2))
    assert any("average" in text for text in texts), texts
    scaled = hvd.allreduce(mine + 1, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    same(scaled, tf.fill([3], float(hvd.size() * (hvd.size() + 1))))
    third = hvd.allreduce(tf.constant(3.0, tf.float64), op=hvd.Max, prescale_factor=1 / 3)
    same(third, tf.constant(3.0 * (1 / 3), tf.float64))  # factors have 64 bits


@case(name=["fp16", "bf16"])
def compression(name: str) -> None:
    how = getattr(hvd.Compression, name)
    result = hvd.allreduce(tf.fill([5], float(hvd.rank() + 1)), op=hvd.Sum, compression=how)
    same(result, tf.fill([5], hvd.size() * (hvd.size() + 1) / 2))
    same(hvd.allreduce(tf.constant([2**40 + 1]), op=hvd.Max, compression=how), tf.constant([2**40 + 1]))


@case()
def reducescatter() -> None:
    for rows in (0, 1, 5, 12):
        mine = values(hvd.rank(), (rows, 3), tf.float32)
        total = everyone((rows, 3), tf.float32).sum(0)
        own = np.array_split(total, hvd.size())[hvd.rank()]
        same(hvd.reducescatter(mine, op=hvd.Sum), tf.cast(own, tf.float32))
        pair = hvd.grouped_reducescatter([mine, tf.cast(mine, tf.int64)], op=hvd.Sum)
        same(pair[0], tf.cast(own, tf.float32))
        same(pair[1], tf.cast(own, tf.int64))


@case()
def allgather() -> None:
    for dtype in MOVABLE:
        mine = values(hvd.rank(), (hvd.rank() + 1, 3), dtype)
        expected = tf.concat([values(rank, (rank + 1, 3), dtype) for rank in range(hvd.size())], 0)
        same(hvd.allgather(mine), expected)
    some = tf.zeros([hvd.rank() % 2, 2])
    assert hvd.allgather(some).shape == (hvd.size() // 2, 2)
    first, second = hvd.grouped_allgather([tf.zeros([0, 3]), tf.range(hvd.rank())])
    assert first.shape == (0, 3)
    same(second, tf.concat([tf.range(rank) for rank in range(hvd.size())], 0))


@case()
def gathered_shapes_in_a_function() -> None:
    @tf.function
    def gather(one: Any) -> Any:
        result = hvd.allgather(one)
        assert result.shape.as_list() == [None, 4]
        return result

    assert gather(tf.ones([2, 4])).shape == (2 * hvd.size(), 4)


@case()
def broadcast() -> None:
    for root in range(hvd.size()):
        for dtype in MOVABLE:
            for shape in SHAPES[:-1]:
                same(hvd.broadcast(values(hvd.rank(), shape, dtype), root), values(root, shape, dtype))
    variables = [tf.Variable(tf.fill([3], hvd.rank())), tf.Variable(hvd.rank() + 0.5)]
    assert hvd.broadcast_(variables, hvd.size() - 1) == variables
    same(variables[0].value(), tf.fill([3], hvd.size() - 1))
    same(variables[1].value(), tf.constant(hvd.size() - 0.5))


@case()
def alltoall() -> None:
    size, rank = hvd.size(), hvd.rank()
    mine = tf.range(2 * size) + 100 * rank
    same(hvd.alltoall(mine), tf.concat([tf.range(2 * rank, 2 * rank + 2) + 100 * r for r in range(size)], 0))
    splits = [(rank + to) % 3 for to in range(size)]
    sent = tf.repeat(tf.range(size), splits)
    for exchange in (hvd.alltoall, tf.function(hvd.alltoall)):
        came, received = exchange(sent, splits)
        same(came, tf.fill([sum((r + rank) % 3 for r in range(size))], rank))
        same(received, tf.constant([(r + rank) % 3 for r in range(size)]))


@case()
def slices_are_put_one_after_another() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = tf.IndexedSlices(tf.fill([rank + 1, 2], 6.0 * size), tf.range(rank + 1), tf.constant([9, 2]))
    summed, dense = hvd.grouped_allreduce([mine, tf.ones([2])], op=hvd.Sum)
    same(dense, tf.fill([2], float(size)))
    expected = [6.0 * size * max(size - row, 0) for row in range(9)]
    same(tf.convert_to_tensor(summed), tf.stack([expected, expected], 1))
    averaged = hvd.allreduce(mine)
    same(tf.convert_to_tensor(averaged), tf.stack([expected, expected], 1) / size)
    with pytest.raises(NotImplementedError, match="dense"):
        hvd.allreduce(mine, op=hvd.Max)


@case(least=2)
def process_sets() -> None:
    count = hvd.size() - 1
    some = hvd.add_process_set(range(1, hvd.size()))
    number = some.process_set_id
    facts = tf.function(lambda: (hvd.size_op(number), hvd.process_set_included_op(number)))
    size, included = facts()
    same(size, count)
    same(included, int(hvd.rank() > 0))
    if hvd.rank():
        same(hvd.allreduce(tf.constant([1.0]), op=hvd.Sum, process_set=some), [float(count)])
        rows = tf.range(2.0 * count)
        scattered = hvd.reducescatter(rows, op=hvd.Sum, process_set=some)
        same(scattered, rows[2 * hvd.rank() - 2 : 2 * hvd.rank()] * count)
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="not a member"):
            hvd.allreduce(tf.constant([1.0]), process_set=some)
    hvd.remove_process_set(some)


@case()
def facts_and_waiting() -> None:
    facts = tf.function(lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()))
    assert [int(fact) for fact in facts()] == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    hvd.barrier()
    tf.function(hvd.barrier)()
    assert 0 <= int(hvd.join()) < hvd.size()
    assert 0 <= int(tf.function(hvd.join)()) < hvd.size()


@case()
def objects() -> None:
    same(tf.constant(hvd.allgather_object({"rank": hvd.rank()})[-1]["rank"]), hvd.size() - 1)
    assert hvd.broadcast_object([hvd.rank()], 0) == [0]
