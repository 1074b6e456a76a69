"""Collectives under JAX's transformations: derivatives, batches, loops, branches, inner functions."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sirtaki.jax as hvd
from cases import case
from cases.jax_collectives import equal

jax.config.update("jax_enable_x64", True)

MIB = 1 << 20


def total(x: Any) -> Any:
    return hvd.allreduce(x, op=hvd.Sum)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-12)


def ranks_sum() -> float:
    return hvd.size() * (hvd.size() - 1) / 2


def check_derivatives(collective: Any, everywhere: Any, shape: tuple[int, ...]) -> None:
    """Compares with JAX's own derivatives of `everywhere`: all ranks' results from all ranks' operands."""
    size, rank = hvd.size(), hvd.rank()
    operands = jnp.arange(float(size * int(np.prod(shape)))).reshape(size, *shape) / 7
    weights = [
        jnp.cos(jnp.arange(1.0, result.size + 1)).reshape(result.shape) + place
        for place, result in enumerate(everywhere(operands))
    ]

    def loss_of_all(x: Any) -> Any:
        return sum((w * r * r).sum() for w, r in zip(weights, everywhere(x), strict=True))

    def own_loss(x: Any) -> Any:
        result = collective(x)
        return (weights[rank] * result * result).sum()

    expected = jax.grad(loss_of_all)(operands)[rank]
    for gradient in (jax.grad(own_loss), jax.jit(jax.grad(own_loss))):
        close(gradient(operands[rank]), expected)
    directions = jnp.sin(operands)
    _, tangents = jax.jvp(everywhere, (operands,), (directions,))
    forward = jax.jit(lambda x, v: jax.jvp(collective, (x,), (v,))[1])
    close(forward(operands[rank], directions[rank]), tangents[rank])


@case()
def derivatives_of_reductions() -> None:
    size = hvd.size()
    check_derivatives(total, lambda x: [x.sum(0)] * size, (3,))
    check_derivatives(hvd.allreduce, lambda x: [x.mean(0)] * size, (2, 2))
    check_derivatives(
        lambda x: hvd.reducescatter(x, prescale_factor=3.0),
        lambda x: list(3.0 * x.mean(0).reshape(size, 2)),
        (2 * size,),
    )


@case()
def derivatives_of_movements() -> None:
    size = hvd.size()
    check_derivatives(hvd.allgather, lambda x: [x.reshape(-1)] * size, (2,))
    check_derivatives(lambda x: hvd.broadcast(x, size - 1), lambda x: [x[size - 1]] * size, (2,))
    check_derivatives(
        hvd.alltoall, lambda x: list(x.reshape(size, size, 2).swapaxes(0, 1).reshape(size, -1)), (2 * size,)
    )


@case()
def derivatives_of_derivatives() -> None:
    second = jax.jit(jax.grad(lambda x: jax.grad(lambda y: total(y**3).sum())(x).sum()))
    close(second(jnp.full(2, 1.0)), 6.0 * hvd.size() * jnp.ones(2))


@case()
def a_tree_with_whole_numbers_can_be_differentiated() -> None:
    gradient = jax.jit(jax.grad(lambda x, n: total({"x": x, "n": n})["x"] * 2))
    assert gradient(jnp.float64(3), jnp.int32(hvd.rank())) == 2 * hvd.size()


@case()
def batches() -> None:
    rows = jnp.arange(12.0).reshape(3, 2, 2) + hvd.rank()
    for axis in (0, 1, 2):
        batched = jax.jit(jax.vmap(total, in_axes=axis))(rows)
        equal(batched, jnp.moveaxis(rows, axis, 0) * hvd.size() + ranks_sum() - hvd.size() * hvd.rank())
    gathered = jax.vmap(hvd.allgather)(rows)
    assert gathered.shape == (3, 2 * hvd.size(), 2)
    equal(gathered[:, 2 * hvd.rank() : 2 * hvd.rank() + 2], rows)
    one = jax.vmap(lambda x, y: total([x, y]), in_axes=(0, None), out_axes=[0, None])(rows, jnp.ones(2))
    equal(one[1], jnp.full(2, float(hvd.size())))
    per_row = jax.vmap(jax.grad(lambda x: (total(x) ** 2).sum()))(jnp.ones((3, 2)))
    close(per_row, 2.0 * hvd.size() ** 2 * jnp.ones((3, 2)))


@case()
def loops() -> None:
    def step(carry: Any, x: Any) -> Any:
        carry = carry + total(x)
        return carry, hvd.allreduce(jax.lax.stop_gradient(carry), op=hvd.Max)

    scanned = jax.jit(lambda xs: jax.lax.scan(step, jnp.zeros(2), xs))
    last, history = scanned(jnp.ones((20, 2)))
    assert last.tolist() == [20.0 * hvd.size()] * 2
    assert history[:, 0].tolist() == [hvd.size() * (turn + 1.0) for turn in range(20)]
    gradient = jax.jit(jax.grad(lambda xs: jax.lax.scan(step, jnp.zeros(2), xs)[0].sum()))
    assert gradient(jnp.ones((5, 2))).tolist() == [[float(hvd.size())] * 2] * 5
    doubled = jax.jit(
        lambda x: jax.lax.while_loop(
            lambda s: total(s[0])[0] < 100 * hvd.size(), lambda s: (s[0] * 2, s[1] + 1), (x, 0)
        )
    )
    assert doubled(jnp.ones(1))[1] == 7
    behind = jax.jit(lambda x: doubled(total(x) / hvd.size())[1] + total(x)[0])
    for count in (1, 5_000):
        assert behind(jnp.ones(count)) == 7 + hvd.size()


@case()
def branches() -> None:
    program = jax.jit(
        lambda go, x: jax.lax.cond(go, lambda y: total(y), lambda y: hvd.allgather(y)[: y.size], x)
    )
    assert program(True, jnp.ones(2)).tolist() == [hvd.size()] * 2
    assert program(False, jnp.arange(2.0)).tolist() == [0, 1]


@case()
def functions_inside_functions() -> None:
    """A function that is called several times has operations of one name each time, on any operands."""
    inner = jax.jit(lambda x: total(jnp.sin(x) * 0 + x))
    outer = jax.jit(lambda *xs: [inner(x) for x in xs] + [inner(inner(xs[0]))])
    given = [jnp.full(300, float(place + 1)) for place in range(12)]
    for _ in range(10):
        results = outer(*given)
        for place, result in enumerate(results[:12]):
            assert float(result[0]) == (place + 1) * hvd.size()
        assert float(results[12][0]) == hvd.size() ** 2
    scans = jax.jit(
        lambda a, b: [jax.lax.scan(lambda c, x: (c + inner(x), None), jnp.zeros(300), xs)[0] for xs in (a, b)]
    )
    first, second = scans(jnp.ones((4, 300)), jnp.full((4, 300), 10.0))
    assert (float(first[0]), float(second[0])) == (4.0 * hvd.size(), 40.0 * hvd.size())


@case()
def programs_for_gpus_order_every_call_and_are_those_of_any_gpu() -> None:
    def program(x: Any) -> Any:
        return [hvd.allreduce(x + number, name=f"part {number}") for number in range(20)]

    traced = jax.jit(program).trace(jnp.ones(5000))  # more than XLA runs in order by itself
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"%(\d+):2 = stablehlo.custom_call @\w+\(%\d+(, %\d+#1)?\) {(.*?)}", text)
    assert [link for _, link, _ in calls] == ["", *(f", %{call}#1" for call, _, _ in calls[:-1])]
    assert len(calls) == 20
    assert not any("device" in attributes for _, _, attributes in calls)


@case()
def names_are_those_of_the_program_however_often_it_is_compiled() -> None:
    inner = jax.jit(total)

    def program(x: Any) -> Any:
        scanned, _ = jax.lax.scan(lambda c, _: (inner(c), None), x, length=2)
        return inner(x), inner(x + 1), total(x), hvd.allreduce(x, name="loss"), scanned

    def names() -> list[Any]:
        text = jax.jit(lambda x: program(x)).lower(jnp.ones(3)).as_text()
        return re.findall(r'names = "([^"]*)", number = (\d+)', text)

    first = names()
    assert sorted(first) == [*(("allreduce", str(number)) for number in range(4)), ("loss", "0")]
    assert names() == first
    jax.clear_caches()
    assert names() == first


@case()
def rematerialised_and_custom_derivatives() -> None:
    assert (
        jax.jit(jax.grad(jax.checkpoint(lambda x: (total(x) ** 2).sum())))(jnp.ones(2)).tolist()
        == [2.0 * hvd.size() ** 2] * 2
    )

    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return total(x)

    doubled.defvjp(lambda x: (total(x), None), lambda _, g: (hvd.allreduce(g) * 2,))
    assert jax.jit(jax.grad(lambda x: doubled(x).sum()))(jnp.ones(2)).tolist() == [2.0, 2.0]


@case(least=2)
def ranks_whose_programs_differ_beside_the_exchange() -> None:
    """Each rank has other shapes, other steps and another compilation around the same operations."""

    @jax.jit
    def program(data: Any, x: Any) -> Any:
        loss = hvd.allreduce(jnp.tanh(data).sum() * 0 + 1.0, op=hvd.Sum)
        for _ in range(hvd.rank() + 1):
            data = jnp.sort(data) @ jnp.ones((data.shape[1], data.shape[1]))
        return loss, total(x + data.sum() * 0), hvd.allgather(x)

    for rows in (1, 5, 9):
        loss, reduced, gathered = program(jnp.ones((rows + 13 * hvd.rank(), 3)), jnp.ones(4))
        assert loss == hvd.size()
        assert reduced.tolist() == [hvd.size()] * 4
        assert gathered.shape == (4 * hvd.size(),)


@case(least=2)
def a_short_program_does_not_overtake_a_long_one() -> None:
    """Both have an operation of the same name and shape, and one rank reaches the first one late."""

    def long(x: Any, matrix: Any) -> Any:
        for _ in range(3):
            matrix = jnp.sort(matrix @ matrix, axis=0) / matrix.size
        return total(x + matrix.sum() * 0)

    first, second = jax.jit(long), jax.jit(total)
    for slow in range(hvd.size()):
        width = 400 if hvd.rank() == slow else 2
        results = [
            (first(jnp.ones(3), jnp.ones((width, width))), second(jnp.full(3, 10.0))) for _ in range(3)
        ]
        for one, other in results:
            assert (one[0], other[0]) == (hvd.size(), 10 * hvd.size())


@case()
def donated_memory_is_reduced_where_it_is() -> None:
    step = jax.jit(total, donate_argnums=0)
    x = jnp.full(8 * MIB, 1.0)  # 64 MiB
    step.lower(x).compile()
    at = x.unsafe_buffer_pointer()
    result = step(x)
    assert result.unsafe_buffer_pointer() == at
    assert x.is_deleted()
    assert float(result[0]) == float(result[-1]) == hvd.size()


@case()
def a_compiled_function_outlives_a_world() -> None:
    traced = []

    @jax.jit
    def program(x: Any) -> Any:
        traced.append(x)
        return total(x)

    assert program(jnp.ones(3)).tolist() == [hvd.size()] * 3
    for _ in range(2):
        hvd.shutdown()
        hvd.init()
        assert program(jnp.ones(3)).tolist() == [hvd.size()] * 3
    assert len(traced) == 1


@case()
def torch_and_jax_share_a_world() -> None:
    import torch

    import sirtaki.torch

    pending = jax.jit(total)(jnp.arange(4.0))
    tensor = sirtaki.torch.allreduce(torch.arange(4.0), op=sirtaki.torch.Sum)
    assert pending.tolist() == tensor.tolist() == [hvd.size() * value for value in range(4)]
