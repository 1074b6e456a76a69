"""Parameters and states that differ between ranks, and equal batches: detected outside jit, or on request."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest

import sirtaki.jax as hvd
from cases import case
from cases.differing import differ, expect_hint_for_equal_batches
from sirtaki.common.training.round_checks import RoundChecks


def loss(params: Any, batch: Any) -> Any:
    return ((params["w"] * batch).sum() + params["b"]) ** 2


class Training:
    """A training loop outside jit."""

    def __init__(self, seed: float) -> None:
        self.params = {"w": jnp.ones(3) + seed, "b": jnp.zeros(())}
        self.optimizer = hvd.DistributedOptimizer(optax.sgd(0.01, momentum=0.9))
        self.state = self.optimizer.init(self.params)

    def step(self, batch: float) -> None:
        gradients = jax.grad(loss)(self.params, jnp.full(3, batch))
        updates, self.state = self.optimizer.update(gradients, self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)


@case(least=2)
def a_forgotten_broadcast() -> None:
    training = Training(hvd.rank())
    training.step(1.0 + hvd.rank())
    differ(
        lambda: training.step(1.0 + hvd.rank()),
        r"\['params'\]\['w'\]. on rank 1 \(pid \d+ on \S+\) is not as on rank 0 ",
        r"call params = hvd\.broadcast_parameters\(params, root_rank=0\)",
    )
    differ(lambda: hvd.check_parameters(training.params), r"\['w'\]. on rank 1")
    training.params = hvd.broadcast_parameters(training.params)
    hvd.check_parameters(training.params)
    training.step(1.0 + hvd.rank())


@case(least=2)
def a_state_that_was_not_broadcast() -> None:
    """Only one rank has loaded the momenta of a checkpoint."""
    training = Training(0.0)
    training.step(1.0 + hvd.rank())
    training.state = jax.tree.map(lambda one: one + hvd.rank(), training.state)
    differ(lambda: training.step(1.0 + hvd.rank()), r"\['state'\].*trace.*\['w'\]. on rank 1")


@case(least=2)
def equal_batches() -> None:
    def train(batch: float) -> None:
        training = Training(0.0)
        for _ in range(3):
            training.step(batch)

    expect_hint_for_equal_batches(train)


@case(least=2)
def compiled_programs_compare_nothing() -> None:
    training = Training(hvd.rank())

    @jax.jit
    def update(gradients: Any, state: Any, params: Any) -> Any:
        return training.optimizer.update(gradients, state, params)

    for _ in range(3):
        update(training.params, training.state, training.params)
    differ(lambda: hvd.check_parameters(training.params), r"\['w'\]. on rank 1")


@case()
def keys_and_functions_in_a_tree() -> None:
    tree = {"key": jax.random.key(hvd.rank()), "f": jnp.tanh, "n": 3, "half": jnp.ones(2, jnp.bfloat16)}
    hvd.check_parameters({name: tree[name] for name in ("f", "n", "half")})
    if hvd.size() > 1:
        with pytest.raises(hvd.ParametersDifferError, match=r"\['key'\]. on rank 1"):
            hvd.check_parameters(tree)


@case(least=2)
def accumulated_passes_outside_of_programs() -> None:
    """Nothing is compiled anew in each update, and each exchange is compared once."""
    rounds, compiled = [], []
    start = RoundChecks.start

    def counted(checks: RoundChecks) -> None:
        rounds.append(checks)
        start(checks)

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    optimizer = hvd.DistributedOptimizer(optax.adam(0.1), backward_passes_per_step=2)
    params = {"w": jnp.zeros(3), "b": jnp.zeros(2, jnp.float32)}
    state = optimizer.init(params)
    counts = []
    with mock.patch.object(RoundChecks, "start", counted):
        for number in range(10):
            gradients = jax.tree.map(lambda one: one + 1.0 + hvd.rank(), params)
            updates, state = optimizer.update(gradients, state, params)
            assert updates["b"].dtype == jnp.float32
            assert bool(updates["w"].any()) == (number % 2 == 1)
            counts.append(len(compiled))
    assert counts[3:] == counts[-1:] * 7, counts
    assert len(rounds) == 5
    assert hvd.stats()["steps"]["count"] == 5
