"""A rank of benchmarks/autotune.py: training steps while autotune changes settings, and afterwards.

Usage: python -m workers.autotune SOCKET MODEL
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import models
from common.measure import timed
from common.serving import serve_alone

import sirtaki.torch as hvd
from sirtaki.bindings.default_context import current
from sirtaki.common.autotune import tuner_of

WARM_UP = 3  # steps of a block that are not measured
STEPS_AT_A_TIME = 50


def torch_step() -> Callable[[], object]:
    """Returns a function that takes a step of the model, which it has made."""
    torch.manual_seed(hvd.rank())  # each rank has a batch of its own
    steps = getattr(models, sys.argv[2])()
    model = steps.make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    return lambda: steps.train(model, optimizer)


def jax_step() -> Callable[[], object]:
    """Returns a function that takes a step inside jax.jit: 25,600 parameters in 400 small tensors."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"  # a rank has one thread
    import jax  # imported late: the other models do without it
    import jax.numpy as jnp
    import optax

    import sirtaki.jax

    layers = [(jnp.ones(64), jnp.zeros(64)) for _ in range(200)]
    inputs = jax.random.normal(jax.random.key(hvd.rank()), (16, 64))  # each rank has a batch of its own
    optimizer = sirtaki.jax.DistributedOptimizer(optax.sgd(1e-3, momentum=0.9))

    def loss(layers: Any) -> Any:
        return sum(((inputs * weights + bias) ** 2).mean() for weights, bias in layers)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(layers: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(layers), state, layers)
        return optax.apply_updates(layers, updates), state

    carried = [layers, optimizer.init(layers)]

    def step() -> None:
        carried[:] = jax.block_until_ready(train(*carried))

    return step


class Rank:
    """The orders that a rank executes."""

    def __init__(self) -> None:
        self._step: Callable[[], object] | None = None

    def step(self) -> None:
        """Takes a step of the model, which the first step makes."""
        if self._step is None:
            self._step = jax_step() if sys.argv[2].startswith("compiled_") else torch_step()
        self._step()

    def tune(self) -> dict[str, Any]:
        """Takes steps until autotune has ended; returns how many, and the changes that were kept."""
        tuner, steps, is_over = None, 0, False
        while not is_over:
            timed(self.step, STEPS_AT_A_TIME)
            steps += STEPS_AT_A_TIME
            tuner = tuner_of(current())
            is_over = hvd.broadcast_object(tuner is None or tuner.is_over)
        changes = tuner.findings.changes if tuner is not None and tuner.findings is not None else []
        return {"steps": steps, "kept": " ".join(map(str, changes))}

    def block(self, steps: int) -> list[float]:
        """Returns the duration of each step, in microseconds."""
        timed(self.step, WARM_UP)
        return timed(self.step, steps)


if __name__ == "__main__":
    serve_alone(Rank())
