"""Derivatives: the differentiated function is the sum of the losses of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import sirtaki.tensorflow as hvd
from cases import case

Collective = Callable[[Any], Any]


def rows_of(rank: int) -> int:
    return (rank + 1) % 3


COLLECTIVES: dict[str, tuple[Collective, Callable[[int], tuple[int, ...]]]] = {
    "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda _: (2, 3)),
    "average": (lambda x: hvd.allreduce(x), lambda _: (2, 3)),
    "scaled sum": (
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda _: (4,),
    ),
    "scalar": (lambda x: hvd.allreduce(x), lambda _: ()),
    "minimum": (lambda x: hvd.allreduce(x, op=hvd.Min), lambda _: (2, 3)),
    "maximum": (lambda x: hvd.allreduce(x, op=hvd.Max), lambda _: (2, 3)),
    "group": (lambda x: tf.concat(hvd.grouped_allreduce([tf.sin(x[:1]), x[1:]]), 0), lambda _: (3, 2)),
    "broadcast of the last": (lambda x: hvd.broadcast(x, hvd.size() - 1), lambda _: (2, 2)),
    "gather of unequal parts": (hvd.allgather, lambda rank: (rows_of(rank), 2)),
    "group of gathers": (
        lambda x: tf.concat(hvd.grouped_allgather([x, x * x]), 0),
        lambda rank: (rows_of(rank), 2),
    ),
    "scattered sum": (lambda x: hvd.reducescatter(x, op=hvd.Sum), lambda _: (5, 2)),
    "scattered average": (lambda x: hvd.reducescatter(x, prescale_factor=0.5), lambda _: (5, 2)),
    "all to all": (hvd.alltoall, lambda _: (2 * hvd.size(), 2)),
    "all to all, some rows": (
        lambda x: hvd.alltoall(x, [1] * hvd.size())[0],
        lambda _: (2 * hvd.size(), 2),
    ),
}


def values(rank: int, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(rank).uniform(0.5, 2.0, shape)


def weights(result: Any) -> Any:
    """Returns the factors of this rank's result, so that losses differ between ranks."""
    numbers = tf.range(tf.size(result)) + hvd.rank()
    return tf.reshape(1 + tf.sqrt(tf.cast(numbers, tf.float64)), tf.shape(result))


@case(name=COLLECTIVES)
def is_that_of_one_function(name: str) -> None:
    """Compares with finite differences of the sum of all ranks' losses, by one rank's input after another."""
    collective, shape_of = COLLECTIVES[name]
    mine = tf.constant(values(hvd.rank(), shape_of(hvd.rank())))

    def loss(x: Any) -> Any:
        result = collective(x)
        return tf.reduce_sum(result * result * weights(result))

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            own = loss(x)
        return tape.gradient(own, x)

    found = gradient(mine).numpy()
    np.testing.assert_allclose(tf.function(gradient)(mine).numpy() if mine.shape.rank else found, found)
    for rank in range(hvd.size()):
        for index in np.ndindex(shape_of(rank)):
            step = np.zeros(mine.shape)
            if rank == hvd.rank():
                step[index] = 1e-5
            ends = [hvd.allreduce(loss(mine + sign * step), op=hvd.Sum).numpy() for sign in (1, -1)]
            if rank == hvd.rank():
                assert found[index] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5)


@case()
def what_is_not_used_counts_as_zero() -> None:
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        first, _ = hvd.grouped_allreduce([x * 3, x * 5], op=hvd.Sum)
    assert float(tape.gradient(first, x)) == 3 * hvd.size()


@case()
def in_another_dtype() -> None:
    """The incoming gradient may have another dtype, and is converted, so that the ranks agree."""
    given = {True: tf.float64, False: tf.float16}[hvd.rank() % 2 == 0]
    for collective in (
        lambda x: hvd.alltoall(x, [1] * hvd.size())[0],
        lambda x: hvd.allreduce(x, op=hvd.Max),
        lambda x: hvd.broadcast(x, 0),
        hvd.allgather,
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
    ):
        x = tf.constant(values(0, (2 * hvd.size(), 2)), tf.float32)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            result = collective(x)
        expected = tape.gradient(result, x, tf.ones_like(result))
        found = tape.gradient(result, x, tf.ones(result.shape, given))
        assert found.dtype == tf.float32
        np.testing.assert_array_equal(found, expected)


@case()
def through_slices() -> None:
    table = tf.Variable(tf.ones([4, 2]))
    with tf.GradientTape() as tape:
        rows = tf.gather(table, [hvd.rank() % 4])
        total = tf.reduce_sum(hvd.allreduce(rows, op=hvd.Sum))
    slices = hvd.allreduce(tape.gradient(total, table), op=hvd.Sum)
    counts = [sum(rank % 4 == row for rank in range(hvd.size())) for row in range(4)]
    assert tf.convert_to_tensor(slices)[:, 0].numpy().tolist() == [float(n * hvd.size()) for n in counts]


@case()
def what_has_none_says_so() -> None:
    x = tf.constant([1.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = hvd.allreduce(x, op=hvd.Product)
    with pytest.raises(ValueError, match="stop_gradient"):
        tape.gradient(result, x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        whole = hvd.allreduce(tf.cast(x, tf.int32), op=hvd.Sum)
    assert tape.gradient(whole, x) is None


@case()
def ranks_that_tie_share_the_gradient_of_an_extreme() -> None:
    """They share it as tf.reduce_max does among equal elements, so that the gradients' sum is preserved."""
    mine = [1.0, float(hvd.rank() > 0), float(hvd.rank())]
    for op, expected in (
        (hvd.Max, [1 / hvd.size(), 1 / max(hvd.size() - 1, 1), float(hvd.rank() == hvd.size() - 1)]),
        (hvd.Min, [1 / hvd.size(), 1.0, float(hvd.rank() == 0)]),
    ):
        x = tf.constant(mine, tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = hvd.allreduce(x, op=op)
        extreme = np.asarray(result) == np.asarray(mine)
        given = tf.constant([hvd.rank() + 1.0] * 3, tf.float64)
        total = hvd.size() * (hvd.size() + 1) / 2
        found = tape.gradient(result, x, output_gradients=given).numpy()
        np.testing.assert_allclose(found, np.where(extreme, np.array(expected) * total, 0.0))


def late(tensor: Any, is_late: bool) -> Any:
    """Returns the tensor, after a delay if it is late, in parallel to everything else in a function."""

    def delayed(value: Any) -> Any:
        time.sleep(0.1 if is_late else 0.0)
        return value

    result = tf.numpy_function(delayed, [tensor], tensor.dtype, stateful=False)
    result.set_shape(tensor.shape)
    return result


@case(name=["maximum", "scattered sum", "group of gathers", "all to all"])
def two_in_one_function_that_start_in_different_orders(name: str) -> None:
    """A function differentiates one result twice, as a GAN does; each rank starts with another derivative."""
    collective, shape_of = COLLECTIVES[name]
    x = tf.constant(values(hvd.rank(), shape_of(hvd.rank())))

    def gradients(x: Any, *late_ones: bool) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            result = collective(x)
        given = [weights(result) * factor for factor in (1.0, 100.0)]
        if late_ones:
            given = [late(one, is_late) for one, is_late in zip(given, late_ones, strict=True)]
        return [tape.gradient(result, x, output_gradients=one) for one in given]

    is_first = hvd.rank() == 0
    found = tf.function(gradients)(x, is_first, not is_first)
    for one, expected in zip(found, gradients(x), strict=True):
        np.testing.assert_allclose(one, expected)
