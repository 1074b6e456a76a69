"""Programs with JAX whose ranks change, as changing.py runs them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sirtaki.jax as hvd
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import HorovodInternalError, UnsupportedError
from sirtaki.bindings.survivors import Membership

jax.config.update("jax_enable_x64", True)

STEPS, ROWS = 3, 4  # in each world; per rank


def parameters() -> Any:
    return {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}


def loss(params: Any, x: Any, y: Any) -> Any:
    return ((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2).mean()


def batch(step: int, rank: int) -> tuple[Any, Any]:
    numbers = np.random.default_rng((step, rank))
    return numbers.normal(size=(ROWS, 3)), numbers.normal(size=(ROWS, 2))


def whole_batch(step: int, size: int) -> tuple[Any, Any]:
    parts = [batch(step, rank) for rank in range(size)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def trained_alone(sizes: Sequence[int]) -> Any:
    params, optimizer = parameters(), optax.adam(0.05)
    state = optimizer.init(params)
    for step in range(STEPS * len(sizes)):
        gradients = jax.grad(loss)(params, *whole_batch(step, sizes[step // STEPS]))
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected)


class Jit:
    """A step that is compiled once, to which the state is donated."""

    is_compiled = True
    optimizer: Any

    def __init__(self) -> None:
        self.optimizer = hvd.DistributedOptimizer(optax.adam(0.05))
        params = parameters()
        self.state = hvd.elastic.JaxState(params=params, optimizer=self.optimizer.init(params), step=0)
        self.traced = 0
        self.step = jax.jit(self._step, donate_argnums=(0, 1)) if self.is_compiled else self._step

    def _step(self, params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        self.traced += 1
        updates, state = self.optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    def take_step(self) -> None:
        state = self.state
        x, y = batch(state.step, hvd.rank())
        state.params, state.optimizer = self.step(state.params, state.optimizer, x, y)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        state = self.state
        for _ in range(STEPS):
            self.take_step()
            state.step += 1
            state.commit()
        assert_close(state.params, trained_alone(sizes))
        assert not self.is_compiled or self.traced == 1
        self.take_step()  # is not committed
        state.restore()
        assert_close(state.params, trained_alone(sizes))
        assert int(state.optimizer[0].count) == state.step == STEPS * len(sizes)


class Eager(Jit):
    is_compiled = False


class Sharded:
    """Divided state: gradients are whole numbers, and momenta exact, so the bits are those of one process.

    No number of ranks divides the parameters evenly; some have fewer elements than there are ranks.
    """

    is_compiled, donated = True, True

    def __init__(self) -> None:
        self.params = {"w": jnp.ones((5, 3)), "b": jnp.zeros(2), "scalar": jnp.ones(())}
        self.optimizer = hvd.shard(self.plain(), op=hvd.Sum)
        self.outside = self.optimizer.init(self.params)
        self.state = hvd.elastic.JaxState(
            donated=self.donated, params=self.params, optimizer=[self.optimizer.init(self.params)], step=0
        )
        donates = (0, 1) if self.donated else ()
        self.step = jax.jit(self._step, donate_argnums=donates) if self.is_compiled else self._step
        self.params = jax.tree.map(jnp.copy, self.params)

    @staticmethod
    def plain() -> Any:
        return optax.sgd(optax.constant_schedule(2.0**-4), momentum=0.5)

    def _step(self, params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def gradients(self, step: int, rank: int) -> Any:
        numbers = np.random.default_rng((step, rank))
        return jax.tree.map(lambda leaf: jnp.asarray(numbers.integers(-9, 9, leaf.shape) * 1.0), self.params)

    def take_step(self, number: int) -> None:
        state, gradients = self.state, self.gradients(number, hvd.rank())
        state.params, own = self.step(state.params, state.optimizer[0], gradients)
        state.optimizer = [own]

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        self.check(sizes[:-1])
        with nullcontext() if hvd.size() == 1 else pytest.raises(UnsupportedError, match="has the slices of"):
            self.optimizer.update(self.gradients(0, 0), self.outside, self.params)
        for index in range(STEPS):
            self.take_step(self.state.step + index)
        self.state.step += STEPS
        self.state.commit()
        self.check(sizes)
        self.take_step(self.state.step)  # is not committed
        self.state.restore()
        self.check(sizes)

    def check(self, sizes: Sequence[int]) -> None:
        """Checks that parameters, and the whole state, are those of one process after these worlds."""
        optimizer, params = self.plain(), self.params
        expected = optimizer.init(params)
        for step in range(STEPS * len(sizes)):
            ranks = range(sizes[step // STEPS])
            total = jax.tree.map(lambda *own: sum(own), *(self.gradients(step, rank) for rank in ranks))
            updates, expected = optimizer.update(total, expected, params)
            params = optax.apply_updates(params, updates)
        found = hvd.full_state(self.plain(), self.state.optimizer[0], self.params)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, (self.state.params, found), (params, expected))


class ShardedEager(Sharded):
    is_compiled, donated = False, False


class ShardedAgreed(Sharded):
    """Before a change that the ranks agree on, each stores all slices: any of them may leave."""

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        super().in_world(number, sizes)
        self.state.prepare_change()


class ShardedUnfinished(Sharded):
    """Rank 1 is interrupted in its last commit of a world, after the exchange of copies."""

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        self.check(sizes[:-1])
        for index in range(STEPS):
            self.take_step(self.state.step + index)
        self.state.step += STEPS
        if hvd.rank() == 1:
            self.state._complete_slices = interrupt
            with pytest.raises(InterruptedError):
                self.state.commit()
            del self.state._complete_slices
        else:
            self.state.commit()


def interrupt() -> None:
    raise InterruptedError


class ShardedLost(Sharded):
    """Ranks are lost together with the ranks that had the copies of their slices."""

    def __init__(self) -> None:
        super().__init__()
        self.elastic, self.state = self.state, self  # type: ignore[assignment]

    def receive(self, start: Any) -> None:
        if hvd.size() == 4:
            self.elastic.receive(start)
            self.elastic.commit()
            with pytest.raises(
                ValueError, match=r"write hvd\.full_state\(optimizer, state, params\) to files"
            ):
                self.elastic.keep_checkpoints("folder")
        else:
            with pytest.raises(HorovodInternalError, match=r"the slices of rank 1 of 4 were on ranks that"):
                self.elastic.receive(start)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        pass


class LocalSteps:
    """DiLoCo in jit: each rank keeps its inner state; the outer transformation's is that of all."""

    def __init__(self) -> None:
        self.optimizer = hvd.diloco(self.inner(), self.outer(), every=STEPS)
        params = parameters()
        self.state = hvd.elastic.JaxState(params=params, optimizer=self.optimizer.init(params), step=0)
        self.step = jax.jit(self._step)

    @staticmethod
    def inner() -> Any:
        return optax.sgd(0.05, momentum=0.9)

    @staticmethod
    def outer() -> Any:
        return optax.sgd(0.7, momentum=0.9, nesterov=True)

    def _step(self, params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        updates, state = self.optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    def take_step(self, number: int) -> None:
        state = self.state
        state.params, state.optimizer = self.step(state.params, state.optimizer, *batch(number, hvd.rank()))

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        state = self.state
        for index in range(STEPS):
            self.take_step(state.step + index)
        state.step += STEPS
        state.params, state.optimizer = self.optimizer.synchronize(state.params, state.optimizer)
        state.commit()
        expected = self.trained_alone(sizes)
        assert_close(state.params, expected)
        self.take_step(state.step)  # is not committed
        for commit in (state.commit, state.check_host_updates):
            with pytest.raises(ValueError, match="since the last synchronization"):
                commit()
        state.restore()
        assert_close(state.params, expected)
        state.check_host_updates()

    def trained_alone(self, sizes: Sequence[int]) -> Any:
        """Returns the parameters after all worlds; a rank that joins has rank 0's inner state."""
        whole, inner, outer = parameters(), self.inner(), self.outer()
        outer_state, states = outer.init(whole), [inner.init(whole)]
        for world, size in enumerate(sizes):
            states = [states[rank if rank < len(states) else 0] for rank in range(size)]
            trained = []
            for rank in range(size):
                params = whole
                for step in range(STEPS * world, STEPS * (world + 1)):
                    gradients = jax.grad(loss)(params, *batch(step, rank))
                    updates, states[rank] = inner.update(gradients, states[rank], params)
                    params = optax.apply_updates(params, updates)
                trained.append(params)
            change = jax.tree.map(lambda one, *own: one - sum(own) / len(own), whole, *trained)
            updates, outer_state = outer.update(change, outer_state, whole)
            whole = optax.apply_updates(whole, updates)
        return whole


class LocalStepsInHalf:
    """The average of 16-bit parameters, which are divided by the number of ranks before their sum."""

    def __init__(self) -> None:
        self.optimizer = hvd.local_sgd(optax.sgd(1.0), every=1)
        params = jnp.zeros(3, jnp.float16)
        self.state = hvd.elastic.JaxState(params=params, optimizer=self.optimizer.init(params))
        self.step = jax.jit(self._step)

    def _step(self, params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = self.optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        state = self.state
        gradient = jnp.full(3, -(hvd.rank() + 1.0), jnp.float16)
        params, optimizer = self.step(state.params, state.optimizer, gradient)
        means = [(size + 1) / 2 for size in sizes]
        np.testing.assert_array_equal(params, np.full(3, sum(means), np.float16))
        state.params, state.optimizer = self.optimizer.synchronize(params, optimizer)
        state.commit()


class CountedSteps(Jit):
    """Steps of a compiled program count when they are committed, in all worlds of a process."""

    committed = 0

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        context, survivors = current(), current().survivors
        assert survivors is not None
        survivors.membership = Membership(number + 1, range(sizes[-1]), sizes[0])
        before = hvd.stats()["steps"]
        assert (before["count"], before["number"]) == (0, self.committed)
        for _ in range(STEPS):
            self.take_step()
            self.state.step += 1
            self.state.commit()
            survivors.commit(context.steps)  # as the loop of an elastic job does
        self.take_step()  # is undone with its world
        jax.block_until_ready(self.state.params)
        after = hvd.stats()["steps"]
        assert (after["count"], after["number"]) == (STEPS + 1, self.committed + STEPS + 1)
        self.committed += STEPS
        self.state.restore()


class Gradients(Jit):
    """Reduced gradients of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer, self.gradients = optax.adam(0.05), hvd.grad(loss)

    def _step(self, params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        self.traced += 1
        updates, state = self.optimizer.update(self.gradients(params, x, y), state, params)
        return optax.apply_updates(params, updates), state


class Constants:
    """Programs with numbers of their world are traced again: shapes, ranks, and what the program asks for."""

    state = None

    def __init__(self) -> None:
        self.gathered = jax.jit(lambda x: hvd.allgather(x))
        self.scattered = jax.jit(lambda x: hvd.reducescatter(x, op=hvd.Sum))
        self.facts = jax.jit(lambda x: x + 10 * hvd.rank() + hvd.size())
        self.keyed = jax.jit(lambda key: jax.random.key_data(hvd.rank_key(key)))
        self.derived = jax.jit(jax.grad(lambda x: (hvd.broadcast(x, 0) * 2.0).sum()))

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        rank, size = hvd.rank(), hvd.size()
        for _ in range(2):
            assert self.gathered(jnp.array([rank])).tolist() == list(range(size))
            assert self.scattered(jnp.ones(6)).tolist() == [size] * (6 // size)
            assert int(self.facts(jnp.zeros((), jnp.int32))) == 10 * rank + size
            key = jax.random.key(3)
            mine = jax.random.key_data(jax.random.fold_in(key, rank)).tolist()
            assert self.keyed(key).tolist() == mine
            assert float(self.derived(jnp.asarray(1.0))) == (0.0 if rank else 2.0 * size)


class Rows:
    """A compiled update for one batch on all ranks: a rank's rows count by the number of ranks, too."""

    state = None
    rows, initial = 5, 0

    def __init__(self) -> None:
        optimizer = hvd.DistributedOptimizer(optax.sgd(-1.0))
        self.update = jax.jit(lambda gradients: optimizer.update(gradients, optimizer.init(gradients))[0])
        self.gradient = jax.grad(loss)  # not compiled: programs that never see the rows are meant

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        survivors: Any = current().survivors
        survivors.averages_over_initial = bool(self.initial)
        survivors.membership = Membership(number, range(hvd.size()), self.initial)
        x, y = np.ones((self.rows, 3)), np.arange(2.0 * self.rows).reshape(-1, 2)
        step = hvd.consistent(
            lambda x, y: self.update(self.gradient(parameters(), x, y)), batch=["x", "y"], out="same"
        )
        assert_close(step(x, y), jax.grad(loss)(parameters(), x, y))


class RowsOverInitial(Rows):
    """Averages that are divided by the number of ranks at the start: even shares count by a factor, too."""

    rows, initial = 6, 2


class FailedExchange:
    """After a failed exchange donated arrays are gone; the last commit is not."""

    def __init__(self) -> None:
        self.state = hvd.elastic.JaxState(params=jnp.ones(4), step=0)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        @partial(jax.jit, donate_argnums=0)
        def step(params: Any, other: Any) -> Any:
            return params + hvd.allreduce(other, name="of different shapes").sum()

        def step_and_commit() -> None:
            self.state.params = step(self.state.params, jnp.ones(2 + hvd.rank()))
            self.state.commit()

        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError, match="of different shapes"):
                step_and_commit()
            assert self.state.can_restore()
            self.state.step = 7
            self.state.restore()
            assert self.state.params.tolist() == [1.0] * 4
            assert self.state.step == 0


class Refusals:
    """Objects on some of the ranks."""

    state = None

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        some = hvd.ProcessSet([0])
        for make in (
            lambda: hvd.DistributedOptimizer(optax.sgd(0.1), process_set=some),
            lambda: hvd.grad(loss, process_set=some),
            lambda: hvd.value_and_grad(loss, process_set=some),
        ):
            with pytest.raises(ValueError, match="leave out process_set"):
                make()
