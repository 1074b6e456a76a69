"""Local steps with optax: every rank equals its replica in a computation of all ranks with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sirtaki.jax as hvd
from cases import case, periodic_replicas
from cases.jax_training import parameters, same_on_all_ranks

RATE, MOMENTUM = 0.1, 0.9


def inner() -> Any:
    return optax.sgd(RATE, momentum=MOMENTUM)


def gradients(params: Any, rank: int, step: int) -> Any:
    """Returns gradients that depend on the parameters, of numpy or of JAX, and differ between ranks."""
    pull = 1.0 + rank + 0.1 * step
    return jax.tree.map(lambda one: one * 0.3 - pull, params)


class Replicas(periodic_replicas.Replicas):
    """Without JAX."""

    def __init__(self, start: Any, size: int) -> None:
        super().__init__([np.asarray(leaf) for leaf in jax.tree.leaves(start)], size)

    def step(self, step: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            found = gradients(self.params[rank], rank, step)
            for place, gradient in enumerate(found):
                self.momenta[rank][place] = MOMENTUM * self.momenta[rank][place] + gradient
                self.params[rank][place] = self.params[rank][place] - RATE * self.momenta[rank][place]


def assert_replica(params: Any, replica: Sequence[Any]) -> None:
    for found, expected in zip(jax.tree.leaves(params), replica, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def stepper(optimizer: Any, is_compiled: bool) -> Callable[..., tuple[Any, Any]]:
    def step(params: Any, state: Any, number: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients(params, hvd.rank(), number), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step) if is_compiled else step


METHODS: dict[str, tuple[Callable[[int], Any], Callable[[Replicas, Sequence[float]], None]]] = {
    "local_sgd": (lambda every: hvd.local_sgd(inner(), every), Replicas.average),
    "diloco": (lambda every: hvd.diloco(inner(), every=every), Replicas.outer_step),
}


@case(
    how=[
        (method, every, how)
        for method in METHODS
        for every in (1, 3)
        for how in ("compiled", "eager")
        if (every, how) != (1, "eager")
    ]
)
def all_ranks_step_as_their_replicas(how: tuple[str, int, str]) -> None:
    method, every, kind = how
    make, exchange = METHODS[method]
    optimizer, params = make(every), parameters()
    state, replicas = optimizer.init(params), Replicas(params, hvd.size())
    step = stepper(optimizer, kind == "compiled")
    for number in range(7):
        params, state = step(params, state, number)
        replicas.step(number, range(hvd.size()))
        if (number + 1) % every == 0:
            exchange(replicas, [1.0] * hvd.size())
        assert int(state.steps) == (number + 1) % every
        assert_replica(params, replicas.params[hvd.rank()])
    params, state = optimizer.synchronize(params, state)
    if every > 1:  # a window of one step is left
        exchange(replicas, [1.0] * hvd.size())
    assert_replica(params, replicas.params[0])
    same_on_all_ranks(params)
    same_on_all_ranks(state.shared)
    assert int(state.steps) == 0


@case(method=METHODS)
def ranks_with_fewer_steps_count_less(method: str) -> None:
    """Rank r has 8 - 3r batches; its eager exchanges at the end meet those of the others' programs."""
    size, every = hvd.size(), 3
    make, exchange = METHODS[method]
    optimizer, params = make(every), parameters()
    state, replicas = optimizer.init(params), Replicas(params, size)
    step = stepper(optimizer, is_compiled=True)
    steps = [max(8 - 3 * rank, 0) for rank in range(size)]
    for number in range(steps[hvd.rank()]):
        params, state = step(params, state, number)
    params, state = optimizer.synchronize(params, state)
    for window in range(0, max(steps) + 1, every):
        taken = [min(max(count - window, 0), every) for count in steps]
        for number in range(window, window + every):
            replicas.step(number, [rank for rank in range(size) if number < steps[rank]])
        if sum(taken):
            exchange(replicas, taken)
    assert_replica(params, replicas.params[0])
    same_on_all_ranks(params)


@case(least=2)
def a_rank_may_join() -> None:
    """The others average without it, even if it is rank 0."""
    optimizer, params = hvd.diloco(inner(), every=2), parameters()
    state, replicas = optimizer.init(params), Replicas(params, hvd.size())
    step = stepper(optimizer, is_compiled=True)
    for number in range(5):
        ranks = range(0 if number < 2 else 1, hvd.size())
        if hvd.rank() in ranks:
            params, state = step(params, state, number)
        elif number == 2:
            jax.block_until_ready(params)  # its last program has to have exchanged
            hvd.join()
            return
        replicas.step(number, ranks)
        if number % 2:
            replicas.outer_step([float(rank in ranks) for rank in range(hvd.size())])
    params, state = optimizer.synchronize(params, state)
    replicas.outer_step([float(rank in ranks) for rank in range(hvd.size())])
    assert_replica(params, replicas.params[1])
    hvd.join()


@case()
def training_continues_after_a_synchronization() -> None:
    """In a loop of a program, which is the same on all ranks."""
    optimizer, params = hvd.diloco(inner(), every=2), parameters()
    state, replicas = optimizer.init(params), Replicas(params, hvd.size())

    @jax.jit
    def steps(params: Any, state: Any, first: Any) -> tuple[Any, Any]:
        step = stepper(optimizer, is_compiled=False)
        return jax.lax.fori_loop(first, first + 3, lambda number, both: step(*both, number), (params, state))

    for first in (0, 3):
        params, state = optimizer.synchronize(*steps(params, state, first))
        for number in range(first, first + 3):
            replicas.step(number, range(hvd.size()))
            if number != first:
                replicas.outer_step([1.0] * hvd.size())
        assert_replica(params, replicas.params[0])


@case()
def several_transformations_have_names() -> None:
    """One program exchanges for both, beside a chain that is inside one of them."""
    first = hvd.local_sgd(optax.chain(optax.clip(0.5), optax.sgd(0.1)), every=2, name="first")
    second = hvd.diloco(inner(), every=2, name="second")
    params = {"first": jnp.ones(3), "second": jnp.ones(3)}
    optimizer = optax.multi_transform(
        {"first": first, "second": second}, {"first": "first", "second": "second"}
    )
    state, step = optimizer.init(params), stepper(optimizer, is_compiled=True)
    alone, replicas = np.ones(3), Replicas({"second": jnp.ones(3)}, hvd.size())
    for number in range(2):
        params, state = step(params, state, number)
        alone = alone + 0.05  # all ranks' gradients are below -0.5
        replicas.step(number, range(hvd.size()))
    replicas.outer_step([1.0] * hvd.size())
    assert_replica(params, [alone, replicas.params[0][0]])


@case()
def an_outer_rate_of_one_averages_the_parameters() -> None:
    """The results agree to two units in the last place."""
    results = []
    for optimizer in (hvd.local_sgd(inner(), 1), hvd.diloco(inner(), optax.sgd(1.0), every=1)):
        params = parameters()
        params, _ = stepper(optimizer, is_compiled=True)(params, optimizer.init(params), 0)
        results.append(params)
    for averaged, stepped in zip(*map(jax.tree.leaves, results), strict=True):
        unit = np.finfo(averaged.dtype).eps * np.abs(averaged).max()
        assert np.abs(averaged - stepped).max() <= 2 * unit


@case()
def parameters_of_16_bits_reach_the_average() -> None:
    """Updates of 32 bits lead to equal bits on all ranks, from parameters that differ."""
    params = {"w": jnp.linspace(-2, 2, 99, dtype=jnp.bfloat16), "b": jnp.ones(3, jnp.float16)}
    optimizer = hvd.local_sgd(optax.sgd(0.1), 2)
    state, step = optimizer.init(params), stepper(optimizer, is_compiled=True)
    for number in range(4):
        params, state = step(params, state, number)
        assert (params["w"].dtype, params["b"].dtype) == (jnp.bfloat16, jnp.float16)
        if number % 2:
            same_on_all_ranks(params)


@case()
def compressed_changes_stay_close() -> None:
    params = parameters()
    optimizer = hvd.diloco(inner(), every=2, compression=hvd.Compression.bf16)
    state, replicas = optimizer.init(params), Replicas(params, hvd.size())
    step = stepper(optimizer, is_compiled=True)
    for number in range(4):
        params, state = step(params, state, number)
        replicas.step(number, range(hvd.size()))
        if number % 2:
            replicas.outer_step([1.0] * hvd.size())
    same_on_all_ranks(state.shared)
    for found, expected in zip(jax.tree.leaves(params), replicas.params[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)
        assert found.dtype == jnp.float64
        if hvd.size() > 1:
            assert not np.allclose(found, expected, rtol=1e-12, atol=1e-13)


@case()
def a_rank_without_a_step_cannot_spoil_the_average() -> None:
    """Its weight is 0, so its NaN does not count."""
    size = hvd.size()
    optimizer, params = hvd.local_sgd(optax.sgd(0.1), 2), {"w": jnp.ones(3)}
    state = optimizer.init(params)
    is_last = hvd.rank() == size - 1 > 0
    if is_last:
        params = {"w": jnp.full(3, jnp.nan)}
    else:
        params, state = stepper(optimizer, is_compiled=False)(params, state, 0)
    params, _ = optimizer.synchronize(params, state)
    ranks = range(max(size - 1, 1))
    expected = sum(1.0 - 0.1 * (0.3 - 1.0 - rank) for rank in ranks) / len(ranks)
    np.testing.assert_allclose(params["w"], expected, rtol=1e-12)


@case()
def other_arguments_are_refused() -> None:
    for make in (hvd.local_sgd, hvd.diloco):
        with pytest.raises(TypeError, match="transformation of optax"):
            make(0.1, every=2)
        for every in (0, 2.5, True):
            with pytest.raises(ValueError, match=f"every is {every}"):
                make(inner(), every=every)
    with pytest.raises(TypeError, match="transformation of optax"):
        hvd.diloco(inner(), 0.7)
    optimizer, params = hvd.local_sgd(inner(), every=2), parameters()
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"optimizer\.update\(gradients, state, params\)"):
        optimizer.update(params, state)
    with pytest.raises(ValueError, match="call it outside jit"):
        jax.jit(optimizer.synchronize)(params, state)
