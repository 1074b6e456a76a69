"""JaxState: trees of arrays that keep their dtype, weak type and device, with ranks as threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from world import world  # noqa: E402

import sirtaki.jax as hvd  # noqa: E402
from sirtaki.bindings.context import current  # noqa: E402
from sirtaki.bindings.errors import ParametersDifferError  # noqa: E402
from sirtaki.common.elastic.state import GenerationStart  # noqa: E402
from sirtaki.jax.elastic import JaxState  # noqa: E402


def tree(seed: int) -> Any:
    """Returns leaves of each kind."""
    return {
        "weights": jnp.arange(6, dtype=jnp.float32).reshape(2, 3) + seed,
        "half": jnp.full((3,), seed, jnp.bfloat16),
        "weak": jnp.asarray(0.5) + seed,
        "weak vector": jnp.full((3,), 0.25) + seed,
        "put": jax.device_put(jnp.ones(2, jnp.int32) * seed, jax.devices()[0]),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 2),
        "numpy": np.arange(3.0) + seed,
        "number": 3 + seed,
        "truth": seed == 0,
        "scalar": np.float32(seed),
        "nothing": None,
        "function": jnp.tanh,
    }


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        if not isinstance(other, jax.Array):
            np.testing.assert_array_equal(one, other)
            continue
        assert (one.dtype, one.shape, one.sharding) == (other.dtype, other.shape, other.sharding)
        if jax.dtypes.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        else:
            assert one.weak_type == other.weak_type
            assert one.committed == other.committed
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def donate(arrays: Any) -> None:
    """Takes arrays away, as a program does that they are donated to."""
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def receive(state: JaxState, *, is_current: bool, all_current: bool = False) -> None:
    state.receive(GenerationStart(current(), is_current, all_current))


def on_ranks(size: int, body: Callable[[], None]) -> None:
    with world(size) as made:
        made.run(body)


def test_a_commit_outlives_donated_arrays() -> None:
    state = JaxState(params=tree(0), optimizer=optax.adam(0.1).init(jnp.ones(3)), epoch=1)
    donate(state.params)
    donate(state.optimizer)
    state.params, state.epoch = None, 2
    for _ in range(2):  # a restored array may be donated, too
        state.restore()
        assert_same(state.params, tree(0))
        assert_same(state.optimizer, optax.adam(0.1).init(jnp.ones(3)))
        assert state.epoch == 1
        donate(state.params)


def test_without_donation_a_commit_keeps_the_arrays() -> None:
    params = tree(0)
    state = JaxState(donated=False, params=params, epoch=1)
    assert not state._copies
    state.params, state.epoch = tree(1), 2
    state.restore()
    assert state.params is params
    assert state.epoch == 1
    donate(params)
    assert not state.can_restore()
    with pytest.raises(RuntimeError, match="donated"):
        state.restore()


def test_an_array_that_was_donated_cannot_be_committed() -> None:
    state = JaxState(params=tree(0), epoch=1)
    donate(state.params)
    state.epoch = 2
    with pytest.raises(RuntimeError, match="deleted"):
        state.commit()
    assert state.can_restore()
    state.restore()
    assert_same(state.params, tree(0))
    assert state.epoch == 1


def test_own_names_attributes() -> None:
    with pytest.raises(ValueError, match="'keys'"):
        JaxState(own=["keys"], key=jax.random.key(0))


@pytest.mark.parametrize("donated", [True, False])
def test_a_rank_that_has_lost_its_arrays_takes_those_of_rank_0(donated: bool) -> None:
    def body() -> None:
        rank = hvd.rank()
        mine = jax.random.key(100 + rank)
        state = JaxState(donated, ["mine"], params=tree(rank), mine=mine, epoch=rank)
        function = state.params["function"] = jnp.sin if rank else jnp.cos
        if rank:
            donate(state.params)
        receive(state, is_current=rank == 0)
        assert state.params["function"] is function
        assert_same(state.params | {"function": 0}, tree(0) | {"function": 0})
        assert jax.random.key_data(state.mine).tolist() == jax.random.key_data(mine).tolist()
        assert state.epoch == 0
        state.params = None
        state.restore()
        assert_same(state.params | {"function": 0}, tree(0) | {"function": 0})

    on_ranks(2, body)


def test_a_weak_type_is_that_of_rank_0() -> None:
    """A step may have made a strong type of it, which a new rank's array does not have yet."""

    def body() -> None:
        rate = jnp.asarray(0.5)
        if hvd.rank() == 0:
            rate = jnp.asarray(0.25, rate.dtype)
        state = JaxState(rate=rate)
        receive(state, is_current=hvd.rank() == 0)
        assert not state.rate.weak_type
        assert float(state.rate) == 0.25

    on_ranks(2, body)


def test_an_array_that_differs_is_repaired() -> None:
    def body() -> None:
        state = JaxState(params=tree(0))
        untouched = state.params["weights"]
        if hvd.rank() == 1:
            state.params["weak vector"] = state.params["weak vector"] + 0.5
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            receive(state, is_current=True, all_current=True)
        assert_same(state.params, tree(0))
        assert state.params["weights"] is untouched

    on_ranks(2, body)


def test_trees_that_do_not_match_are_refused() -> None:
    def body() -> None:
        state = JaxState(params={"a": jnp.ones(2 + hvd.rank())})
        with pytest.raises(ParametersDifferError, match=r"params\['a'\]"):
            receive(state, is_current=hvd.rank() == 0)

    on_ranks(2, body)


def test_gradients_of_several_passes_stay_on_the_rank() -> None:
    """Their sums differ between ranks; a rank that takes rank 0's state starts without any."""

    def body() -> None:
        rank = hvd.rank()
        optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), backward_passes_per_step=2)
        params = jnp.zeros(3)
        _, optimizer_state = optimizer.update(jnp.full(3, rank + 1.0), optimizer.init(params), params)
        state = JaxState(params=params, optimizer=optimizer_state)
        receive(state, is_current=True, all_current=True)
        assert state.optimizer.total.tolist() == [rank + 1.0] * 3
        receive(state, is_current=rank == 0)
        assert state.optimizer.total.tolist() == [0.0 if rank else 1.0] * 3
        assert int(state.optimizer.passes) == 1

    on_ranks(2, body)


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "around"])
def test_gradients_of_multi_steps_stay_on_the_rank_until_ranks_join(is_inside: bool) -> None:
    """Around DistributedOptimizer they are a rank's own, inside averages: a new rank has neither."""

    def body() -> None:
        rank = hvd.rank()
        passes, optimizer = 3, optax.MultiSteps(optax.sgd(1.0), 3).gradient_transformation()
        if is_inside:
            optimizer = hvd.DistributedOptimizer(optimizer)
        params, gradients = {"w": jnp.zeros(3)}, {"w": jnp.full(3, rank + 1.0)}

        def mean(state: JaxState) -> Any:
            return jax.tree.leaves(state.optimizer.acc_grads)[0].tolist()

        _, first = optimizer.update(gradients, optimizer.init(params), params)
        state = JaxState(params=params, optimizer=first)
        receive(state, is_current=True, all_current=True)
        state.restore()
        assert mean(state) == [1.5 if is_inside else rank + 1.0] * 3
        assert int(state.optimizer.mini_step) == 1
        receive(state, is_current=rank == 0)  # rank 1 has joined
        assert mean(state) == [0.0] * 3
        assert int(state.optimizer.mini_step) == 0
        for _ in range(passes):
            updates, state.optimizer = optimizer.update(gradients, state.optimizer, params)
        found = (
            updates["w"] if is_inside else hvd.allreduce(updates["w"])
        )  # threads cannot do it in a program
        np.testing.assert_allclose(found, -1.5, rtol=1e-6)

    on_ranks(2, body)


def test_passes_of_multi_steps_begin_again_with_a_checkpoint() -> None:
    """It has no gradients of other ranks, and those of one are not those of all."""
    optimizer = optax.MultiSteps(optax.sgd(1.0), 2)
    params = jnp.zeros(2)
    _, after = optimizer.update(jnp.ones(2), optimizer.init(params), params)
    other = JaxState(params=params, optimizer=optimizer.init(params))
    other.load_checkpoint(JaxState(params=params, optimizer=after).checkpoint())
    assert int(other.optimizer.mini_step) == 0
    assert other.optimizer.acc_grads.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("donated", [True, False])
def test_a_checkpoint_is_loaded_by_another_process(donated: bool) -> None:
    import cloudpickle

    state = JaxState(donated, params=tree(3), epoch=3)
    pickled = cloudpickle.dumps(state.checkpoint())
    other = JaxState(donated, params=tree(0), epoch=0)
    other.load_checkpoint(cloudpickle.loads(pickled))
    other.restore()
    assert_same(other.params, tree(3))
    assert other.epoch == 3
