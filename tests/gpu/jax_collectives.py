"""Step 5: JAX's all-reduce and all-gather inside jit, between computations on the GPU."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
from card import skip

if importlib.util.find_spec("jax") is None:
    skip("jax is not installed here")
    sys.exit()

import jax
import jax.numpy as jnp

import sirtaki.jax as hvd

COUNTS = (1, 1000, 1 << 20)


@jax.jit
def exchange(x: jax.Array) -> tuple[Any, Any, Any]:
    """Returns the sum of 2 x, the rows of all ranks, and an average of what depends on both."""
    doubled = x * 2
    total, rows = hvd.allreduce(doubled, op=hvd.Sum), hvd.allgather(x)
    return total, rows, hvd.allreduce(total + rows[: x.shape[0]], op=hvd.Average)


def main() -> None:
    hvd.init()  # chooses the rank's GPU, before JAX's first computation
    ranks = range(hvd.size())
    for count in COUNTS:
        values = np.arange(count, dtype=np.float32) % 7
        for _ in range(3):
            total, rows, last = exchange(jnp.asarray(values + hvd.rank()))
            expected = 2 * sum(values + rank for rank in ranks)
            np.testing.assert_array_equal(np.asarray(total), expected)
            np.testing.assert_array_equal(np.asarray(rows), np.concatenate([values + rank for rank in ranks]))
            np.testing.assert_array_equal(np.asarray(last), expected + values)
    if jax.default_backend() != "gpu" and hvd.rank() == 0:
        skip(f"ran on the CPU: jax {jax.__version__} finds no GPU here")
    hvd.shutdown()


if __name__ == "__main__":
    main()
