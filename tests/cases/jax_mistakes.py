"""Mistakes of JAX users: each has its exception, whose text names the remedy, and does no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sirtaki.jax as hvd
from cases import case
from sirtaki.bindings.errors import NotInitializedError, UnsupportedError
from sirtaki.jax.ops import lowering

jax.config.update("jax_enable_x64", True)

# The exceptions that JAX raises for a program that fails while it starts, or later.
FAILURES = (ValueError, jax.errors.JaxRuntimeError)


def still_works() -> None:
    assert float(jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.ones(()))) == hvd.size()


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind) as caught:
        jax.block_until_ready(call())
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"
    still_works()


def in_program(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: jax.jit(function)(*arguments)


@case(least=2)
def programs_of_other_shapes() -> None:
    rows = jnp.ones((2 + hvd.rank() % 2, 3))
    error = jax.errors.JaxRuntimeError
    refused(
        in_program(lambda x: hvd.allreduce(x, name="loss"), rows),
        "ranks disagree about 'loss'",
        "[3, 3]",
        kind=error,
    )
    refused(in_program(lambda x: hvd.allgather({"w": x}), rows), "['w']", "the same shape", kind=error)
    pair = jnp.ones((hvd.size() * (1 + hvd.rank() % 2), 3))
    refused(in_program(lambda x: hvd.alltoall(x), pair), "ranks disagree", kind=error)
    refused(in_program(lambda x: hvd.reducescatter(x), pair), "ranks disagree", kind=error)
    refused(lambda: hvd.allreduce(rows, name="loss"), "ranks disagree about 'loss'", kind=hvd.MismatchError)


@case(least=2)
def programs_that_combine_otherwise() -> None:
    op = hvd.Sum if hvd.rank() else hvd.Max
    refused(
        in_program(lambda x: hvd.allreduce(x, op=op), jnp.ones(2)),
        "the reduce op",
        kind=jax.errors.JaxRuntimeError,
    )
    refused(
        in_program(lambda x: hvd.broadcast(x, hvd.rank() % 2), jnp.ones(2)),
        "root rank",
        kind=jax.errors.JaxRuntimeError,
    )


@case()
def dtypes_that_cannot_be_exchanged() -> None:
    keys = jax.random.key(1)
    for call in (hvd.allreduce, lambda x: hvd.broadcast(x, 0)):
        refused(lambda call=call: call(keys), "key_data", kind=UnsupportedError)
        refused(in_program(call, keys), "key_data", kind=UnsupportedError)
    small = jnp.ones(2).astype("int4")
    refused(lambda: hvd.allgather(small), "int4", "float32", kind=UnsupportedError)
    refused(in_program(hvd.allgather, small), "int4", "float32", kind=UnsupportedError)


@case()
def dtypes_that_cannot_be_reduced() -> None:
    refused(lambda: hvd.allreduce(jnp.ones(2, bool)), "bool", kind=UnsupportedError)
    refused(
        in_program(hvd.allreduce, jnp.ones(2, bool)), "UNIMPLEMENTED", "bool", kind=jax.errors.JaxRuntimeError
    )


@case()
def shapes_that_do_not_fit() -> None:
    uneven = jnp.ones(hvd.size() + 1)
    if hvd.size() > 1:
        refused(in_program(lambda x: hvd.alltoall(x), uneven), "equal parts")
        refused(in_program(lambda x: hvd.reducescatter(x), uneven), "equal parts")
    refused(in_program(hvd.allgather, jnp.ones(())), "no dimensions", "(1,)")
    refused(lambda: hvd.allgather(jnp.ones(())), "first dimension")
    refused(in_program(lambda x: hvd.alltoall(x, [1] * hvd.size())[0], jnp.ones(hvd.size())), "splits")


@case()
def what_has_no_derivative() -> None:
    largest = lambda x: hvd.allreduce(x, op=hvd.Max)  # noqa: E731
    refused(lambda: jax.grad(largest)(1.0), "derivative", kind=NotImplementedError)
    batched = jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum))
    refused(lambda: batched(jnp.ones((2, 2))), "vmap", kind=NotImplementedError)


@case()
def names_of_several_lines() -> None:
    for call in (hvd.allreduce, hvd.allgather):
        refused(lambda call=call: call(jnp.ones(2), name="two\nlines"), "cannot be printed")
        refused(in_program(lambda x, call=call: call(x, name="two\nlines"), jnp.ones(2)), "cannot be printed")


@case()
def a_barrier_inside_jit() -> None:
    def program(x: Any) -> Any:
        hvd.barrier()
        return x

    refused(in_program(program, 1.0), "inside jit")


@case()
def a_jax_that_tells_of_no_lowered_program() -> None:
    """Without numbers, calls would be mistaken for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "_LOWERED", "/another/event")
        with pytest.raises(FAILURES, match=r"UNIMPLEMENTED: .*this version of JAX does not tell"):
            jax.block_until_ready(jax.jit(lambda x: hvd.allreduce(x) + 1)(jnp.ones(3)))
    lowering._modules.unnamed.clear()
    still_works()


@case()
def things_that_are_no_arrays() -> None:
    refused(lambda: hvd.allreduce({"w": "text"}), "['w']", "str", kind=TypeError)
    refused(lambda: hvd.DistributedOptimizer(1.0), "optax", kind=TypeError)


@case()
def no_world() -> None:
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    program(jnp.ones(2))
    hvd.shutdown()
    with pytest.raises(NotInitializedError):
        hvd.allreduce(jnp.ones(2))
    with pytest.raises(FAILURES, match=r"FAILED_PRECONDITION: .* init\(\)"):
        jax.block_until_ready(program(jnp.ones(2)))
    hvd.init()
    assert program(jnp.ones(2)).tolist() == [hvd.size()] * 2


@case(least=2)
def a_program_for_another_set() -> None:
    some = hvd.add_process_set([0])
    program = jax.jit(lambda x: hvd.allreduce(x, process_set=some))
    if some.included():
        assert program(jnp.ones(2)).tolist() == [1, 1]
    hvd.remove_process_set(some)
    if hvd.rank() == 0:
        with pytest.raises(FAILURES, match="process set"):
            jax.block_until_ready(program(jnp.ones(2)))
    still_works()


@case(least=2)
def a_line_search_along_each_ranks_own_loss() -> None:
    optimizer = hvd.DistributedOptimizer(optax.lbfgs())
    params = jnp.ones(2)
    state = optimizer.init(params)
    given = {"value": jnp.ones(()), "grad": params, "value_fn": jnp.sum}
    refused(
        lambda: optimizer.update(params, state, params, **given),
        "each rank's own data",
        kind=UnsupportedError,
    )
    still_works()


@case()
def compressions_that_need_a_memory() -> None:
    for name in ("powersgd", "topk", "onebit", "int8", "fp8"):
        make = getattr(hvd.Compression, name)
        refused(make, "sirtaki.torch", kind=UnsupportedError)
