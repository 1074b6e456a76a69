"""Collectives on JAX's arrays, outside jit and inside: the results are equal, and exact."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sirtaki.jax as hvd
from cases import case

jax.config.update("jax_enable_x64", True)

DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
)


def both(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result outside jit, after checking that the result inside jit is equal."""
    outside, inside = function(*arguments), jax.jit(function)(*arguments)
    jax.tree.map(equal, outside, inside)
    return outside


def equal(actual: Any, expected: Any) -> None:
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def mine(*shape: int, dtype: Any = "float64") -> Any:
    """Returns numbers that differ between ranks and elements; every dtype holds their sums exactly."""
    count = int(np.prod(shape))
    return ((jnp.arange(count) % 3) * (1 + hvd.rank() % 2)).reshape(shape).astype(dtype)


def everyone(*shape: int, dtype: Any = "float64") -> list[Any]:
    """Returns each rank's `mine`."""
    count = int(np.prod(shape))
    base = (np.arange(count) % 3).reshape(shape)
    return [jnp.asarray(base * (1 + rank % 2)).astype(dtype) for rank in range(hvd.size())]


@case(dtype=DTYPES)
def sums(dtype: str) -> None:
    for shape in ((), (5,), (3, 0), (2, 3, 4)):
        expected = sum(np.asarray(each, "complex128") for each in everyone(*shape, dtype=dtype))
        result = both(lambda x: hvd.allreduce(x, op=hvd.Sum), mine(*shape, dtype=dtype))
        equal(result, jnp.asarray(expected if "complex" in dtype else expected.real).astype(dtype))


@case(dtype=(*DTYPES, "bool", "float8_e8m0fnu"))
def what_is_moved(dtype: str) -> None:
    if not hasattr(jnp, dtype):
        return
    rows = jnp.ones((hvd.size(), 2)).astype(dtype) if "e8m0" in dtype else mine(hvd.size(), 2, dtype=dtype)
    root = hvd.size() - 1
    first = rows if "e8m0" in dtype else everyone(hvd.size(), 2, dtype=dtype)[root]
    equal(both(lambda x: hvd.broadcast(x, root), rows), first)
    gathered = both(hvd.allgather, rows)
    assert gathered.shape == (hvd.size() ** 2, 2)
    equal(gathered[hvd.rank() * hvd.size() : (hvd.rank() + 1) * hvd.size()], rows)


@case()
def other_reductions() -> None:
    all_of_them = jnp.stack(everyone(4))
    for op, combine in ((hvd.Min, jnp.min), (hvd.Max, jnp.max), (hvd.Product, jnp.prod)):
        equal(both(lambda x, op=op: hvd.allreduce(x, op=op), mine(4)), combine(all_of_them, 0))
    equal(both(hvd.allreduce, mine(4)), jnp.sum(all_of_them, 0) / hvd.size())
    scaled = both(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), mine(4))
    equal(scaled, 2 * jnp.sum(all_of_them, 0))
    equal(both(lambda x: hvd.allreduce(x, op=hvd.Max), mine(4) > 0), jnp.max(all_of_them > 0, 0))


@case()
def trees_travel_as_one() -> None:
    tree = {"weights": [mine(3), mine(2, 2, dtype="float32")], "bias": (mine(), None)}
    result = both(lambda x: hvd.allreduce(x, op=hvd.Sum), tree)
    equal(result["weights"][1], jnp.sum(jnp.stack(everyone(2, 2, dtype="float32")), 0))
    assert result["bias"][1] is None
    first, second = hvd.grouped_allreduce([mine(2), mine(3, dtype="int32")], op=hvd.Sum)
    equal(second, jnp.sum(jnp.stack(everyone(3, dtype="int32")), 0, dtype="int32"))
    assert first.shape == (2,)
    assert both(hvd.allreduce, {}) == {}


@case()
def numbers_and_numpy_arrays() -> None:
    assert hvd.allreduce(float(hvd.rank()), op=hvd.Sum) == hvd.size() * (hvd.size() - 1) / 2
    assert hvd.allreduce(np.full(3, 2), op=hvd.Sum).tolist() == [2 * hvd.size()] * 3
    strided = jnp.asarray(np.arange(6.0).reshape(2, 3).T)
    equal(hvd.allreduce(strided, op=hvd.Sum), strided * hvd.size())


@case()
def rows_are_scattered() -> None:
    total = jnp.sum(jnp.stack(everyone(2 * hvd.size(), 3)), 0)
    result = both(lambda x: hvd.reducescatter(x, op=hvd.Sum), mine(2 * hvd.size(), 3))
    equal(result, total[2 * hvd.rank() : 2 * hvd.rank() + 2])
    uneven = hvd.reducescatter(jnp.arange(hvd.size() + 1.0), op=hvd.Sum)
    assert uneven.shape == (2 if hvd.rank() == 0 else 1,)


@case()
def rows_are_exchanged() -> None:
    given = jnp.arange(2.0 * hvd.size()) + 100 * hvd.rank()
    result = both(hvd.alltoall, given)
    expected = [2.0 * hvd.rank() + place + 100 * other for other in range(hvd.size()) for place in range(2)]
    assert result.tolist() == expected
    splits = [rank + 1 for rank in range(hvd.size())]
    came, received = hvd.alltoall(jnp.full(sum(splits), hvd.rank()), splits)
    assert received.tolist() == [hvd.rank() + 1] * hvd.size()
    assert came.tolist() == [rank for rank in range(hvd.size()) for _ in range(hvd.rank() + 1)]


@case()
def ragged_rows_are_gathered_outside_jit() -> None:
    result = hvd.allgather({"a": jnp.full((hvd.rank(), 2), hvd.rank()), "b": jnp.ones(1)})
    assert result["a"][:, 0].tolist() == [rank for rank in range(hvd.size()) for _ in range(rank)]
    assert result["b"].shape == (hvd.size(),)


@case(least=3)
def some_of_the_ranks() -> None:
    some = hvd.add_process_set([0, hvd.size() - 1])
    program = jax.jit(
        lambda x: (hvd.allreduce(x, op=hvd.Sum, process_set=some), hvd.allgather(x, process_set=some))
    )
    if some.included():
        total, gathered = program(jnp.full(2, 1.0 + hvd.rank()))
        assert total.tolist() == [1.0 + hvd.size()] * 2
        assert gathered.tolist() == [1.0, 1.0, hvd.size(), hvd.size()]
    assert jax.jit(hvd.allreduce)(jnp.ones(2)).tolist() == [1, 1]


@case()
def large_arrays() -> None:
    million = jnp.arange(1_000_003.0) + hvd.rank()
    total = both(lambda x: hvd.allreduce(x, op=hvd.Sum), million)
    expected = hvd.size() * jnp.arange(1_000_003.0) + hvd.size() * (hvd.size() - 1) / 2
    equal(total, expected)


@case()
def objects() -> None:
    assert hvd.broadcast_object({"step": hvd.rank()}, 0) == {"step": 0}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@case()
def barrier() -> None:
    if hvd.rank() == hvd.size() - 1:
        time.sleep(0.05)
    came = time.monotonic()
    hvd.barrier()
    times = hvd.allgather_object((came, time.monotonic()))
    assert min(left for _, left in times) >= max(came for came, _ in times)
