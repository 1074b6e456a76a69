"""Optax transformations with divided state: the updates of those without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sirtaki.jax as hvd
from cases import case
from cases.jax_training import alike, loss, own_batch, parameters, same_on_all_ranks, train, whole_batch

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.01, 0.001, 4), weight_decay=0.1),
}


def uneven() -> Any:
    """Returns parameters that no number of ranks divides evenly, and some that have one element or none."""
    return {**parameters(), "one": jnp.ones(1), "scalar": jnp.ones(()), "none": jnp.ones((0, 3))}


def loss_of_all(params: Any, inputs: Any, targets: Any) -> Any:
    return loss(params, inputs, targets) * params["scalar"] + (params["one"] ** 2).sum()


def stepped(optimizer: Any, params: Any, state: Any, steps: range) -> tuple[Any, Any]:
    """Trains outside jit."""
    for number in steps:
        gradients = jax.grad(loss_of_all)(params, *own_batch(number))
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@case(kind=OPTIMIZERS)
def state_is_divided_inside_jit(kind: str) -> None:
    ours = train(hvd.shard(OPTIMIZERS[kind]()), own_batch, uneven(), loss_of_all)
    alike(ours, train(OPTIMIZERS[kind](), whole_batch, uneven(), loss_of_all))
    same_on_all_ranks({name: ours[name] for name in ("hidden", "out", "one", "scalar")})


@case()
def whole_states_continue_divided_and_whole() -> None:
    plain = OPTIMIZERS["adamw"]()
    optimizer = hvd.shard(plain)
    params, state = stepped(optimizer, uneven(), optimizer.init(uneven()), range(3))
    unsharded = hvd.DistributedOptimizer(plain)
    other, expected = stepped(unsharded, uneven(), unsharded.init(uneven()), range(3))
    full = hvd.full_state(plain, state, params)
    assert jax.tree.structure(full) == jax.tree.structure(expected)
    assert jax.tree.map(jnp.shape, full) == jax.tree.map(jnp.shape, expected)
    alike(full, expected)
    again, _ = stepped(optimizer, params, hvd.divided_state(plain, full, params), range(3, 6))
    whole, _ = stepped(unsharded, params, full, range(3, 6))
    alike(again, whole)
    alike(again, stepped(unsharded, other, expected, range(3, 6))[0])


@case(least=2)
def each_rank_has_its_part_of_the_state() -> None:
    params = {"w": jnp.ones((64, 33)), "b": jnp.ones(64)}
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    own = sum(leaf.size for leaf in jax.tree.leaves(hvd.shard(optax.adam(0.1)).init(params)))
    assert own <= 2 * (count / hvd.size() + len(params)) + 1  # two moments, and the number of steps


@case()
def what_looks_at_several_elements_is_refused() -> None:
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}

    def matrices(given: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, given)

    skipping = optax.MultiSteps(optax.adam(0.1), 3, should_skip_update_fn=optax.skip_not_finite)
    for optimizer in (
        optax.chain(optax.clip_by_global_norm(1000.0), optax.sgd(0.1)),
        optax.lamb(0.1),
        optax.adamw(0.1, mask=matrices),
        optax.apply_if_finite(optax.adam(0.1), 5),
        skipping.gradient_transformation(),
    ):
        with pytest.raises(ValueError, match="looks at several elements together"):
            hvd.shard(optimizer).init(params)
        with pytest.raises(ValueError, match="looks at several elements together"):
            jax.eval_shape(hvd.shard(optimizer).init, params)
    factored = optax.adafactor(0.1, clipping_threshold=None, multiply_by_parameter_scale=False)
    with pytest.raises(ValueError, match="a factored moment"):  # those of optax, of 128 elements and more
        hvd.shard(factored).init({"w": jnp.ones((128, 128))})
    hvd.shard(factored).init(params)
    masked = optax.adamw(0.1, mask={"w": True, "b": False})
    hvd.shard(masked).init(params)
    chained = optax.chain(optax.clip(1.0), hvd.shard(optax.adam(0.1)))
    updates, _ = chained.update(params, chained.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)


@case()
def a_step_with_an_overflow_on_one_rank_is_left_out_on_all() -> None:
    """As the page shows it: by a flag that is reduced."""
    optimizer = hvd.shard(optax.adam(0.1))
    params = {"w": jnp.ones((4, 3))}

    @jax.jit
    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        finite = jnp.array([jnp.isfinite(one).all() for one in jax.tree.leaves(gradients)]).all()
        finite = hvd.allreduce(finite, op=hvd.Min)
        updates, new_state = optimizer.update(gradients, state, params)
        new = optax.apply_updates(params, updates), new_state
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, (params, state))

    start = optimizer.init(params)
    overflow = jnp.ones((4, 3)).at[0, 0].set(jnp.inf if hvd.rank() == hvd.size() - 1 else 1.0)
    after, state = step(params, start, {"w": overflow})
    alike((after, state), (params, start))
    after, state = step(params, state, {"w": jnp.ones((4, 3))})
    np.testing.assert_allclose(after["w"], 0.9, rtol=1e-5)


@case()
def other_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="transformation of optax"):
        hvd.shard(0.1)
    with pytest.raises(ValueError, match=r"op=hvd\.Average or op=hvd\.Sum"):
        hvd.shard(optax.sgd(0.1), op=hvd.Max)
