"""The program of a trial job: `all_reduce.py FRAMEWORK` sums an array of a framework over the ranks."""

from __future__ import annotations

import importlib
import sys

# The module in which `ones(shape)` makes an array of each framework.
_ARRAYS = {
    "numpy": "numpy",
    "torch": "torch",
    "tensorflow": "tensorflow",
    "keras": "keras.ops",
    "jax": "jax.numpy",
}


def main(framework: str) -> int:
    arrays = importlib.import_module(_ARRAYS[framework])
    hvd = importlib.import_module(f"sirtaki.{framework}")
    hvd.init()
    total = hvd.allreduce(arrays.ones((1000,)) * (hvd.rank() + 1), op=hvd.Sum)
    expected = hvd.size() * (hvd.size() + 1) / 2
    sums = set((total if hasattr(total, "tolist") else total.numpy()).tolist())
    if sums != {expected}:
        print(f"rank {hvd.rank()}: the sums are {sums} instead of {expected}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
