"""Collectives in tf.function: loops, branches, names, orders, and objects that outlive a world."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf

import sirtaki.tensorflow as hvd
from cases import case


def at_some_time(tensor: Any) -> Any:
    """Returns the tensor after a random delay on each rank, in parallel to everything else."""

    def delayed(value: Any) -> Any:
        time.sleep(random.uniform(0, 0.003))
        return value

    result = tf.numpy_function(delayed, [tensor], tensor.dtype, stateful=False)
    result.set_shape(tensor.shape)
    return result


def factor() -> float:
    """Returns the sum of rank + 1 over the ranks."""
    return hvd.size() * (hvd.size() + 1) / 2


@case()
def iterations_that_run_side_by_side() -> None:
    @tf.function
    def loop(mine: Any) -> Any:
        results = tf.TensorArray(tf.float32, 24)
        for i in tf.range(24):
            results = results.write(i, hvd.allreduce(at_some_time(mine * tf.cast(i, tf.float32)), op=hvd.Sum))
        return results.stack()

    for _ in range(3):
        sums = loop(tf.constant([hvd.rank() + 1.0]))
        assert sums[:, 0].numpy().tolist() == [i * factor() for i in range(24)]


@case()
def a_loop_with_state() -> None:
    total = tf.Variable(0.0)

    @tf.function
    def loop(mine: Any) -> Any:
        for i in tf.range(6):
            total.assign_add(hvd.allreduce(mine + total, op=hvd.Average))
            if i % 2 == 0:
                total.assign(hvd.allreduce(total, op=hvd.Max))
        return total.read_value()

    expected = 0.0
    for _ in range(6):
        expected += (hvd.size() - 1) / 2 + expected
    assert float(loop(tf.constant(float(hvd.rank())))) == expected


@case()
def branches() -> None:
    @tf.function
    def either(flag: Any, mine: Any) -> Any:
        return hvd.allreduce(mine, op=hvd.Sum) if flag else hvd.allreduce(mine, op=hvd.Max)

    mine = tf.constant(hvd.rank() + 1.0)
    assert float(either(tf.constant(True), mine)) == factor()
    assert float(either(tf.constant(False), mine)) == hvd.size()
    assert (
        float(tf.cond(tf.constant(True), lambda: hvd.allreduce(mine), lambda: mine)) == factor() / hvd.size()
    )


@case()
def one_function_called_twice_in_another() -> None:
    @tf.function
    def total(mine: Any) -> Any:
        return hvd.allreduce(at_some_time(mine), op=hvd.Sum)

    @tf.function
    def both(mine: Any) -> Any:
        return [total(mine * number) for number in (1.0, 2.0, 3.0, 4.0)]

    for _ in range(3):
        sums = both(tf.constant(hvd.rank() + 1.0))
        assert [float(one) for one in sums] == [factor() * number for number in (1, 2, 3, 4)]


@case()
def many_at_once_in_different_orders() -> None:
    @tf.function
    def step(mine: Any) -> Any:
        return [
            hvd.allreduce(at_some_time(mine + float(number)), op=hvd.Sum, name=f"step.{number}")
            for number in range(40)
        ]

    for _ in range(3):
        sums = step(tf.constant([float(hvd.rank())]))
        base = hvd.size() * (hvd.size() - 1) / 2
        assert [float(one[0]) for one in sums] == [base + number * hvd.size() for number in range(40)]


@case()
def calls_that_depend_on_each_other() -> None:
    @tf.function
    def chain(mine: Any) -> Any:
        for _ in range(5):
            mine = hvd.allreduce(mine + 1, op=hvd.Average)
            mine = hvd.broadcast(mine * 2, 0)
        return mine

    expected = (hvd.size() - 1) / 2
    for step in range(5):
        expected = ((expected if step else (hvd.size() - 1) / 2) + 1) * 2
    assert float(chain(tf.constant(float(hvd.rank())))) == expected


@case()
def traced_again() -> None:
    @tf.function
    def total(mine: Any) -> Any:
        return hvd.allreduce(mine, op=hvd.Sum), hvd.allreduce(mine, op=hvd.Max, name="same")

    for length in (1, 2, 1, 3, 2):
        added, most = total(tf.fill([length], float(hvd.rank())))
        assert added.shape == (length,)
        assert float(most[0]) == hvd.size() - 1


@case()
def one_name_twice_in_a_function() -> None:
    @tf.function
    def twice(mine: Any) -> Any:
        return [hvd.allreduce(at_some_time(mine * scale), op=hvd.Sum, name="x") for scale in (1.0, 2.0, 3.0)]

    sums = twice(tf.constant(hvd.rank() + 1.0))
    assert [float(one) for one in sums] == [factor() * scale for scale in (1, 2, 3)]


@case()
def a_data_set() -> None:
    own = hvd.rank() + 1
    sums = tf.data.Dataset.range(8).map(lambda one: hvd.allreduce(one * own, op=hvd.Sum))
    assert [int(one) for one in sums] == [number * factor() for number in range(8)]


@case()
def memory_is_taken_over_and_left_alone() -> None:
    @tf.function
    def step(mine: Any) -> Any:
        fresh = mine + 1
        return hvd.allreduce(fresh, op=hvd.Sum), hvd.allreduce(mine, op=hvd.Sum), mine * 1

    kept = tf.ones([1000]) * (hvd.rank() + 1)
    for _ in range(3):
        changed, total, unchanged = step(kept)
        assert float(changed[0]) == factor() + hvd.size()
        assert float(total[0]) == factor()
        assert float(unchanged[0]) == hvd.rank() + 1
        assert float(tf.reduce_sum(kept)) == 1000 * (hvd.rank() + 1)


@case()
def new_names_take_no_memory() -> None:
    def steps(first: int, count: int) -> None:
        for number in range(first, first + count):
            hvd.allreduce(tf.ones([2]), op=hvd.Sum, name=f"epoch.{number}")

    steps(0, 300)
    before = psutil.Process().memory_info().rss
    steps(300, 600)
    assert psutil.Process().memory_info().rss - before < 8 << 20  # kernels for 600 names would take 20 MiB


@case()
def a_function_outlives_its_world() -> None:
    @tf.function
    def total(mine: Any) -> Any:
        return hvd.allreduce(mine, op=hvd.Sum), hvd.rank_op()

    mine = tf.constant(1.0)
    assert float(total(mine)[0]) == hvd.size()
    size = hvd.size()
    hvd.shutdown()
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"init\(\)"):
        total(mine)
    hvd.init()
    assert hvd.size() == size
    added, rank = total(mine)
    assert (float(added), int(rank)) == (size, hvd.rank())


@case()
def beside_another_framework() -> None:
    import sirtaki.numpy as numpy_hvd

    assert numpy_hvd.rank() == hvd.rank()
    handle = numpy_hvd.allreduce_async(np.ones(3), op=numpy_hvd.Sum, name="numpy's")
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == hvd.size()
    assert numpy_hvd.synchronize(handle).tolist() == [hvd.size()] * 3
