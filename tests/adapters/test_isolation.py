"""Jobs with Keras or JAX whose ranks train for themselves: rank 0 says so at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from process_world import hvdrun, run

PROGRAM = """
import time
import optax
import jax.numpy as jnp
import sirtaki.jax as hvd

hvd.init()
params = hvd.broadcast_parameters({"w": jnp.ones(4)}, root_rank=0)
optimizer = optax.sgd(0.1)
state = optimizer.init(params)
for step in range(3):
    gradients = {"w": jnp.ones(4) * hvd.rank()}
    WHAT
    updates, state = optimizer.update(gradients, state)
    params = optax.apply_updates(params, updates)
time.sleep(6)
"""


@pytest.mark.parametrize("exchanges", [False, True])
def test_ranks_that_train_for_themselves(exchanges: bool, tmp_path: Path) -> None:
    pytest.importorskip("optax")
    script = tmp_path / "train.py"
    what = 'gradients = {"w": hvd.allreduce(gradients["w"])}' if exchanges else "pass"
    script.write_text(PROGRAM.replace("WHAT", what))
    done = run(*hvdrun(2, sys.executable, script))
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "exchanged nothing" in line]
    if exchanges:
        assert not told
    else:
        (line,) = told
        assert line.startswith("[0] sirtaki: in ")
        assert "the 2 ranks have exchanged nothing but what they have broadcast" in line
        assert line.endswith("sirtaki.jax.DistributedOptimizer")
