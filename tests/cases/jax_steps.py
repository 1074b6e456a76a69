"""Training steps are counted where they are exchanged, in compiled programs and outside of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from exposed_waits import assert_exposed, assert_late_rank_is_waited_for, exposed_seconds

import sirtaki.jax as hvd
from cases import case
from sirtaki.bindings.context import current
from sirtaki.jax.ops import arrays, lowering, primitives

PARAMETERS = {"w": jnp.ones((3, 2), jnp.float32), "b": jnp.zeros(2, jnp.float32)}


def loss(params: Any) -> Any:
    return ((params["w"].sum(0) + params["b"]) ** 2).sum()


def step_of(optimizer: Any) -> Callable[[Any], Any]:
    """Returns a training step, which takes and returns parameters and state."""

    def step(carried: Any) -> Any:
        params, state = carried
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def start(optimizer: Any) -> Any:
    return PARAMETERS, optimizer.init(PARAMETERS)


def counted(run: Callable[[], Any]) -> int:
    """Returns the number of steps that are counted until the results of `run` can be read."""
    before = hvd.stats()["steps"]["count"]
    jax.block_until_ready(run())
    return hvd.stats()["steps"]["count"] - before


def repeated(step: Callable[[Any], Any], carried: Any, times: int) -> Any:
    for _ in range(times):
        carried = step(carried)
    return carried


@case(compression=("none", "fp16"))
def compiled_steps_are_counted(compression: str) -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), compression=getattr(hvd.Compression, compression))
    step, carried = jax.jit(step_of(optimizer)), start(optimizer)
    assert counted(lambda: repeated(step, carried, 7)) == 7
    steps = hvd.stats()["steps"]
    assert (steps["number"], sum(steps["times"]["counts"])) == (7, 6)
    assert steps["times"]["total_seconds"] > 0
    assert steps["exposed_seconds"] is None


@case()
def steps_of_a_loop_are_counted_one_by_one() -> None:
    optimizer = hvd.DistributedOptimizer(optax.adam(0.1))
    step = step_of(optimizer)

    @jax.jit
    def loop(carried: Any) -> Any:
        carried, _ = jax.lax.scan(lambda carry, _: (step(carry), None), carried, length=10)
        return jax.lax.fori_loop(0, 5, lambda _, carry: step(carry), carried)

    assert counted(lambda: loop(start(optimizer))) == 15
    assert counted(lambda: loop(start(optimizer))) == 15


@case(compiled=(True, False))
def an_update_counts_if_it_exchanges(compiled: bool) -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), backward_passes_per_step=3)
    step = jax.jit(step_of(optimizer)) if compiled else step_of(optimizer)
    carried = start(optimizer)
    for expected in (0, 0, 1, 0, 0, 1, 0):
        before = hvd.stats()["steps"]["count"]
        carried = jax.block_until_ready(step(carried))
        assert hvd.stats()["steps"]["count"] - before == expected


@case()
def accumulated_steps_of_a_loop_are_counted() -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), backward_passes_per_step=4)
    step = step_of(optimizer)
    loop = jax.jit(lambda carried: jax.lax.scan(lambda carry, _: (step(carry), None), carried, length=10)[0])
    carried = start(optimizer)
    assert counted(lambda: loop(carried)) == 2
    assert counted(lambda: loop(loop(carried))) == 5


@case()
def steps_outside_of_programs_count_with_those_inside() -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    step = step_of(optimizer)
    compiled, carried = jax.jit(step), start(optimizer)

    def train() -> Any:
        return repeated(step, repeated(compiled, repeated(step, carried, 2), 3), 4)

    assert counted(train) == 9


@case()
def each_of_several_optimizers_counts() -> None:
    both = [hvd.DistributedOptimizer(optax.sgd(0.1), name=name) for name in ("generator", "critic")]
    steps = [step_of(one) for one in both]

    @jax.jit
    def step(generator: Any, critic: Any) -> Any:
        return steps[0](generator), steps[1](steps[1](critic))

    assert counted(lambda: step(*map(start, both))) == 3


@case()
def optimizers_of_one_name_have_numbers_of_their_own() -> None:
    """In programs, by which autotune tells them apart; those that it does not measure have none.

    Without autotune all programs are the same, as JAX's persistent cache needs.
    """
    measured = [hvd.DistributedOptimizer(optax.sgd(0.1), name="of one name") for _ in range(2)]
    others = [hvd.DistributedOptimizer(optax.sgd(0.1), op=hvd.Adasum)]
    if hvd.size() > 1:
        one_rank = hvd.add_process_set([0])
        others.append(hvd.DistributedOptimizer(optax.sgd(0.1), process_set=one_rank))

    def number_of(optimizer: Any) -> int:
        text = jax.jit(step_of(optimizer)).lower(start(optimizer)).as_text()
        (number,) = re.findall(r"ends_step = (\d+)", text)
        return int(number)

    with mock.patch.object(lowering, "is_tuned", return_value=False):
        assert [number_of(one) for one in measured] == [1, 1]
    with mock.patch.object(lowering, "is_tuned", return_value=True):
        assert_numbers_tell_apart(number_of, measured, others)
    if hvd.size() > 1:
        hvd.remove_process_set(one_rank)


def assert_numbers_tell_apart(
    number_of: Callable[[Any], int], measured: Sequence[Any], others: Sequence[Any]
) -> None:
    first, second = map(number_of, measured)
    assert len({first, second, number_of(measured[0])}) == 2
    assert min(first, second) > 1
    assert hvd.allgather_object([first, second]) == [[first, second]] * hvd.size()
    assert [number_of(one) for one in others] == [1] * len(others)


@case()
def other_exchanges_are_no_steps() -> None:
    @jax.jit
    def program(params: Any) -> Any:
        params = hvd.broadcast(params, 0)
        _, gradients = hvd.value_and_grad(loss)(params)
        return hvd.allreduce(gradients, name="gradients"), hvd.allgather(params["w"])

    assert counted(lambda: program(PARAMETERS)) == 0


@case()
def derivatives_of_a_step_are_no_steps() -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))

    def loss_after_step(params: Any) -> Any:
        gradients = {"w": params["w"] * 2, "b": params["b"]}
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return loss(optax.apply_updates(params, updates))

    program = jax.jit(jax.grad(loss_after_step))
    assert counted(lambda: program(PARAMETERS)) == 1


@case()
def a_batch_of_updates_is_one_step() -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    gradients = jax.tree.map(lambda one: jnp.stack([one] * 4), PARAMETERS)
    updates = jax.vmap(lambda one: optimizer.update(one, optimizer.init(PARAMETERS), PARAMETERS)[0])
    assert counted(lambda: updates(gradients)) == 1  # outside of a program
    assert counted(lambda: jax.jit(updates)(gradients)) == 1


@case(least=2, compression=("none", "fp16"))
def steps_outside_of_programs_wait_for_their_exchanges(compression: str) -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), compression=getattr(hvd.Compression, compression))
    carried = repeated(step_of(optimizer), start(optimizer), 3)
    assert_exposed("gradients", len(PARAMETERS))
    before = exposed_seconds()
    hvd.allreduce(carried[0], name="other exchange")
    assert exposed_seconds() == before


@case(least=2)
def others_wait_for_a_late_rank() -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    step = step_of(optimizer)
    carried = step(start(optimizer))
    assert_late_rank_is_waited_for(lambda: jax.block_until_ready(step(carried)))


@case(least=2)
def own_computations_are_not_exposed() -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    step = step_of(optimizer)
    carried = step(start(optimizer))
    exposed, view, seen = current().steps.exposed, arrays.reducible_view, []
    before = len(exposed.recent)

    def read(*given: Any) -> Any:  # waits until an array has been computed
        seen.append(len(exposed.recent))
        return view(*given)

    with mock.patch.object(arrays, "reducible_view", read):
        step(carried)
    assert seen == [before] * len(PARAMETERS)  # before the next wait
    assert len(exposed.recent) == before + 1


@case(least=2)
def nothing_is_measured_on_gpus() -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    carried = start(optimizer)
    with mock.patch.object(primitives, "_only_device", return_value=SimpleNamespace(platform="cuda")):
        assert counted(lambda: step_of(optimizer)(carried)) == 1
    assert exposed_seconds() is None
