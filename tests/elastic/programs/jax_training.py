"""Trains a small network with JAX on ranks that may be lost, and checks itself against one process.

SHARD asks for a division of the optimizer's state.

Usage: jax_training.py SAMPLES EPOCHS
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from replayed import (
    FEATURES,
    Steps,
    equal_parts,
    hold,
    merge,
    next_samples,
    own_part,
    pace,
    pause,
    regression,
    report,
    weights,
)

import sirtaki.jax as hvd

jax.config.update("jax_enable_x64", True)
SAMPLES, EPOCHS = map(int, sys.argv[1:])
X, Y = regression(SAMPLES)


def parameters() -> dict[str, Any]:
    names = ("w", "b", "v")
    return dict(zip(names, map(jnp.asarray, weights((FEATURES, 16), (16,), (16, 1))), strict=True))


def loss_of(params: Any, x: Any, y: Any, parts: Any) -> Any:
    errors = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - y
    return parts @ (errors[:, 0] ** 2)


def make_step(optimizer: Any) -> Callable[..., Any]:
    """Returns a compiled step, to which parameters and moments are donated."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, moments: Any, x: Any, y: Any, parts: Any) -> tuple[Any, Any]:
        updates, moments = optimizer.update(jax.grad(loss_of)(params, x, y, parts), moments, params)
        return optax.apply_updates(params, updates), moments

    return step


def replay(steps: Steps) -> Any:
    """Returns the parameters after these steps in one process."""
    optimizer, params = optax.adam(0.01), parameters()
    moments, step = optimizer.init(params), make_step(optimizer)
    for _, taken in steps:
        rows, parts = equal_parts(taken)
        params, moments = step(params, moments, X[rows], Y[rows], np.array(parts))
    return params


@hvd.elastic.run
def train(state: Any, step: Callable[..., Any]) -> None:
    while True:
        hold(state, hvd.size)
        epoch, taken = next_samples(state.steps, SAMPLES, hvd.size())
        if epoch == EPOCHS:
            return
        rows, parts = own_part(taken, hvd.rank(), hvd.size())
        state.params, state.moments = step(state.params, state.moments, X[rows], Y[rows], np.array(parts))
        pause()
        state.steps = [*state.steps, (epoch, merge(hvd.allgather_object(rows if any(parts) else [])))]
        state.step += 1
        pause()
        state.commit()
        pace(state.step)


def main() -> None:
    hvd.init()
    distributed = hvd.shard if "SHARD" in os.environ else hvd.DistributedOptimizer
    optimizer, params = distributed(optax.adam(0.01)), parameters()
    state = hvd.elastic.JaxState(params=params, moments=optimizer.init(params), step=0, steps=[])
    train(state, make_step(optimizer))
    leaves = map(jax.tree.leaves, (state.params, replay(state.steps)))
    report(state.steps, *leaves, hvd.size())


if __name__ == "__main__":
    main()
