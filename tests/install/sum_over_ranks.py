"""Sums an array over the ranks and reports it: python sum_over_ranks.py numpy|torch"""

from __future__ import annotations

import importlib
import sys


def main(framework: str) -> None:
    library, hvd = importlib.import_module(framework), importlib.import_module(f"sirtaki.{framework}")
    hvd.init()
    total = hvd.allreduce(library.ones(1000) * (hvd.rank() + 1), op=hvd.Sum)
    expected = hvd.size() * (hvd.size() + 1) / 2
    if not bool((total == expected).all()):
        sys.exit(f"rank {hvd.rank()}: the sum is {total[0]} instead of {expected}")
    print(f"{framework}: the sum over {hvd.size()} ranks is right")


if __name__ == "__main__":
    main(sys.argv[1])
