"""Takes steps with gradients that are worker numbers plus one, averaged over the ranks, in one framework.

Each worker of VICTIMS, such as "3:4,2:8", kills itself at that step. Each rank reports its parameter's change
in each step, by the size of the world. With HOLD=STEP:SIZE the training waits at that step for a world of
that size.

Usage: averages.py FRAMEWORK STEPS VICTIMS OVER; OVER is "live", "initial", or "mixed" (worker 1 differs).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from replayed import hold

FRAMEWORK, STEPS, OVER = sys.argv[1], int(sys.argv[2]), sys.argv[4]
WORKER = int(os.environ["SIRTAKI_WORKER"])
FATAL_STEP = dict(pair.split(":") for pair in sys.argv[3].split(",")).get(str(WORKER))
hvd = importlib.import_module(f"sirtaki.{FRAMEWORK.partition('-')[0]}")
CHANGES: dict[str, list[float]] = {}
Parts = tuple[Callable[[], Any], Callable[[], float], Callable[[float], Any]]


def torch_parts() -> Parts:
    import torch

    weight = torch.nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, [("weight", weight)])

    def step() -> None:
        optimizer.zero_grad()
        (weight * (WORKER + 1.0)).sum().backward()
        optimizer.step()

    return step, lambda: weight.item(), lambda value: weight.data.fill_(value)


def jax_parts() -> Parts:
    import jax
    import jax.numpy as jnp

    current = [jnp.zeros(())]
    slope = hvd.grad(lambda weight: weight * (WORKER + 1.0))
    compiled = jax.jit(lambda weight: weight - slope(weight))

    def step() -> None:
        current[0] = compiled(current[0])

    return step, lambda: float(current[0]), lambda value: current.__setitem__(0, jnp.asarray(value))


def tensorflow_parts() -> Parts:
    import tensorflow as tf

    weight = tf.Variable(0.0)

    def step() -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = weight * (WORKER + 1.0)
        weight.assign_sub(tape.gradient(loss, weight))

    compiled = tf.function(step) if FRAMEWORK.endswith("-function") else step
    return compiled, lambda: float(weight), weight.assign


def keras_parts() -> Parts:
    import keras

    weight = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])

    def step() -> None:
        optimizer.apply([keras.ops.convert_to_tensor(WORKER + 1.0)], [weight])

    return step, lambda: float(keras.ops.convert_to_numpy(weight)), weight.assign


@hvd.elastic.run
def train(state: Any, parts: Parts) -> None:
    step, value, assign = parts
    assign(state.weight)
    while state.step < STEPS:
        hold(state, hvd.size)
        if str(state.step) == FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        CHANGES.setdefault(str(hvd.size()), []).append(state.weight - value())
        state.weight = value()
        state.step += 1
        state.commit()


def main() -> None:
    hvd.init()
    makers = {"torch": torch_parts, "jax": jax_parts, "tensorflow": tensorflow_parts, "keras": keras_parts}
    parts = makers[FRAMEWORK.partition("-")[0]]()
    state = hvd.elastic.ObjectState(step=0, weight=0.0)
    is_initial = (WORKER == 1) if OVER == "mixed" else OVER == "initial"
    state.average_over("initial" if is_initial else "live")
    train(state, parts)
    changes = {size: sorted(set(found)) for size, found in CHANGES.items()}
    print("RESULT " + json.dumps({"worker": WORKER, "changes": changes}), flush=True)


if __name__ == "__main__":
    main()
