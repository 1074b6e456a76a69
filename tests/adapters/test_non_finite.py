"""A gradient that is not finite on one rank, in the steps of each framework: its rank is named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from process_world import hvdrun, run

PROGRAMS = {
    "torch": """
import torch
import sirtaki.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
for number in range(4):
    optimizer.zero_grad()
    model(torch.full((3, 4), float("nan") if hvd.rank() == 1 and number == 2 else 1.0)).sum().backward()
    optimizer.step()
""",
    "jax": """
import jax, jax.numpy as jnp, optax
import sirtaki.jax as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
params = {"w": jnp.ones(4)}
state = optimizer.init(params)

@jax.jit
def step(params, state, batch):
    gradients = jax.grad(lambda some: (batch @ some["w"]).mean())(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

for number in range(4):
    batch = jnp.full((3, 4), jnp.nan if hvd.rank() == 1 and number == 2 else 1.0)
    params, state = step(params, state, batch)
jax.block_until_ready(params)
""",
    "tensorflow": """
import tensorflow as tf
import sirtaki.tensorflow as hvd
hvd.init()
weights = tf.Variable(tf.ones((4, 1)))

@tf.function
def step(batch):
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_mean(batch @ weights)
    weights.assign_sub(tape.gradient(loss, [weights])[0])

for number in range(4):
    step(tf.fill((3, 4), float("nan") if hvd.rank() == 1 and number == 2 else 1.0))
""",
    "keras": """
import keras, numpy as np
import sirtaki.keras as hvd
hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
batches = np.ones((8, 4), np.float32)
if hvd.rank() == 1:
    batches[5] = np.nan
model.fit(batches, np.ones(8), 2, shuffle=False, verbose=0)
""",
}


@pytest.mark.parametrize("framework", PROGRAMS)
def test_the_rank_of_a_gradient_that_is_not_finite_is_named(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    script = tmp_path / "train.py"
    script.write_text(PROGRAMS[framework])
    done = run(*hvdrun(2, sys.executable, script))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if " adds " in line]
    named = r"\[1\] sirtaki: rank 1 \(pid \d+ on \S+\) adds a NaN to the sum of '\S+' over 2 ranks"
    assert re.match(named, line), line
    if framework in ("torch", "jax"):  # which count steps
        assert "ranks, after 2 training steps" in line
