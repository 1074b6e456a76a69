"""Training on N ranks equals one process with the N-fold batch: optax, Flax, Equinox."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sirtaki.jax as hvd
from cases import case

jax.config.update("jax_enable_x64", True)

ROWS, STEPS = 6, 5  # rows per rank
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)),
}
FOLLOWING: dict[str, Callable[[], Any]] = {  # the loss
    "plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=1, accumulation_size=1)
    ),
    "polyak": lambda: optax.polyak_sgd(100.0, scaling=0.1),
}


def whole_batch(step: int) -> tuple[Any, Any]:
    numbers = np.random.default_rng(step)
    return (
        jnp.asarray(numbers.normal(size=(ROWS * hvd.size(), 4))),
        jnp.asarray(numbers.normal(size=(ROWS * hvd.size(), 2))),
    )


def own_batch(step: int) -> tuple[Any, Any]:
    first = ROWS * hvd.rank()
    inputs, targets = whole_batch(step)
    return inputs[first : first + ROWS], targets[first : first + ROWS]


def parameters(seed: int = 0) -> Any:
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "hidden": {"w": jax.random.normal(keys[0], (4, 8)), "b": jnp.zeros(8)},
        "out": {"w": jax.random.normal(keys[1], (8, 2)), "b": jnp.zeros(2)},
    }


def loss(params: Any, inputs: Any, targets: Any) -> Any:
    hidden = jnp.tanh(inputs @ params["hidden"]["w"] + params["hidden"]["b"])
    return ((hidden @ params["out"]["w"] + params["out"]["b"] - targets) ** 2).mean()


def train(
    optimizer: Any, batch_of: Callable[[int], Any], params: Any, loss: Any = loss, steps: int = STEPS
) -> Any:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params, value=value)
        return optax.apply_updates(params, updates), state

    optimizer = optax.with_extra_args_support(optimizer)
    params = jax.tree.map(jnp.copy, params)
    state = optimizer.init(params)
    for number in range(steps):
        params, state = step(params, state, *batch_of(number))
    return params


def alike(ours: Any, reference: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), ours, reference)


def same_on_all_ranks(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        gathered = hvd.allgather(leaf[None])
        np.testing.assert_array_equal(gathered, jnp.broadcast_to(leaf, gathered.shape))


@case(kind=[*OPTIMIZERS, *FOLLOWING])
def as_one_process(kind: str) -> None:
    make = {**OPTIMIZERS, **FOLLOWING}[kind]
    ours = train(hvd.DistributedOptimizer(make()), own_batch, parameters())
    alike(ours, train(make(), whole_batch, parameters()))
    same_on_all_ranks(ours)


@case()
def several_passes_for_one_step() -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), backward_passes_per_step=3)
    ours = train(optimizer, own_batch, parameters(), steps=7)
    params = parameters()
    for first in (0, 3):
        gradients = [jax.grad(loss)(params, *whole_batch(first + number)) for number in range(3)]
        params = jax.tree.map(lambda p, *g: p - 0.1 * sum(g), params, *gradients)
    alike(ours, params)


@case()
def gradients_of_a_function() -> None:
    inputs = own_batch(0)
    expected = jax.grad(loss)(parameters(), *whole_batch(0))
    value, gradients = jax.jit(hvd.value_and_grad(loss))(parameters(), *inputs)
    alike(gradients, expected)
    alike(value, loss(parameters(), *inputs))
    alike(hvd.grad(loss)(parameters(), *inputs), expected)
    with_more = hvd.grad(lambda *given: (loss(*given), "more"), has_aux=True)
    gradients, more = with_more(parameters(), *inputs)
    assert more == "more"
    alike(gradients, expected)


@case()
def gradients_in_16_bits() -> None:
    small = jnp.asarray([0.5, 1.0, 3.0]) * (1 + hvd.rank())
    mean = jnp.asarray([0.5, 1.0, 3.0]) * (hvd.size() + 1) / 2
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = jax.jit(partial(hvd.allreduce, compression=compression))({"w": small, "n": jnp.int32(4)})
        np.testing.assert_allclose(result["w"], mean, rtol=1e-2)
        assert result["w"].dtype == small.dtype
        assert result["n"].tolist() == 4


@case()
def unequal_starts_become_equal() -> None:
    given = {
        "params": parameters(hvd.rank()),
        "key": jax.random.key(hvd.rank()),
        "activation": jnp.tanh,
        "step": 3.0,
    }
    shared = hvd.broadcast_parameters(given, root_rank=hvd.size() - 1)
    alike(shared["params"], parameters(hvd.size() - 1))
    assert shared["activation"] is jnp.tanh
    assert shared["key"] == jax.random.key(hvd.size() - 1)
    state = hvd.broadcast_parameters(optax.adam(0.1).init(shared["params"]))
    assert isinstance(state[0], optax.ScaleByAdamState)


@case()
def each_rank_has_random_numbers_of_its_own() -> None:
    draws = hvd.allgather(jax.random.normal(hvd.rank_key(jax.random.key(7)), (1, 3)))
    assert len({tuple(row) for row in draws.tolist()}) == hvd.size()


@case()
def flax_linen() -> None:
    pytest.importorskip("flax")
    from flax import linen

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.tanh(linen.Dense(8, param_dtype=jnp.float64)(x))
            return linen.Dense(2, param_dtype=jnp.float64)(x)

    network = Network()
    params = hvd.broadcast_parameters(network.init(jax.random.key(hvd.rank()), jnp.ones((1, 4))))

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        return ((network.apply(params, inputs) - targets) ** 2).mean()

    ours = train(hvd.DistributedOptimizer(optax.adam(0.01)), own_batch, params, loss)
    alike(ours, train(optax.adam(0.01), whole_batch, params, loss))


@case()
def flax_nnx() -> None:
    pytest.importorskip("flax")
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.hidden = nnx.Linear(4, 8, rngs=rngs, param_dtype=jnp.float64)
            self.out = nnx.Linear(8, 2, rngs=rngs, param_dtype=jnp.float64)

        def __call__(self, x: Any) -> Any:
            return self.out(nnx.tanh(self.hidden(x)))

    network, params = nnx.split(Network(nnx.Rngs(hvd.rank())))
    params = hvd.broadcast_parameters(params)

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        return ((nnx.merge(network, params)(inputs) - targets) ** 2).mean()

    ours = train(hvd.DistributedOptimizer(optax.adam(0.01)), own_batch, params, loss)
    alike(ours, train(optax.adam(0.01), whole_batch, params, loss))


@case()
def equinox_modules() -> None:
    eqx = pytest.importorskip("equinox")

    @eqx.filter_jit
    def step(model: Any, state: Any, inputs: Any, targets: Any, update: Any) -> Any:
        gradients = eqx.filter_grad(lambda model: ((jax.vmap(model)(inputs) - targets) ** 2).mean())(model)
        updates, state = update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    def trained(optimizer: Any, batch_of: Callable[[int], Any]) -> Any:
        model = hvd.broadcast_parameters(eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(hvd.rank())))
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        for number in range(STEPS):
            model, state = step(model, state, *batch_of(number), optimizer.update)
        return eqx.filter(model, eqx.is_inexact_array)

    alike(
        trained(hvd.DistributedOptimizer(optax.adam(0.01)), own_batch), trained(optax.adam(0.01), whole_batch)
    )


@case()
def updates_outside_jit_and_inside_count_as_steps() -> None:
    optimizer, params = hvd.DistributedOptimizer(optax.sgd(0.1)), parameters()
    state = optimizer.init(params)
    for step in range(STEPS):
        gradients = jax.grad(loss)(params, *own_batch(step))
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert hvd.stats()["steps"]["count"] == STEPS
    jax.block_until_ready(train(optimizer, own_batch, params))  # compiled
    assert hvd.stats()["steps"]["count"] == 2 * STEPS


@case()
def samples_that_count_alike() -> None:
    """Ranks with other numbers of samples, one of them with none, divide sums by the number of all."""
    counts = [3 * rank for rank in range(hvd.size())]
    first = sum(counts[: hvd.rank()])

    def joined_batch(step: int) -> Any:
        return [rows[: sum(counts)] for rows in whole_batch(step)]

    def uneven_batch(step: int) -> Any:
        return [rows[first : first + counts[hvd.rank()]] for rows in whole_batch(step)]

    def part_of_loss(params: Any, inputs: Any, targets: Any) -> Any:
        total = hvd.allreduce(jnp.asarray(len(inputs)), op=hvd.Sum)
        hidden = jnp.tanh(inputs @ params["hidden"]["w"] + params["hidden"]["b"])
        return ((hidden @ params["out"]["w"] + params["out"]["b"] - targets) ** 2).mean(1).sum() / total

    ours = train(
        hvd.DistributedOptimizer(optax.adam(0.01), op=hvd.Sum), uneven_batch, parameters(), part_of_loss
    )
    alike(ours, train(optax.adam(0.01), joined_batch, parameters()))
