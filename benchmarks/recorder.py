"""Measures what the flight recorder, which is always on, costs an operation.

    python benchmarks/recorder.py [--json FILE]

The cost covers everything that the core does to record an operation, from its submission to its end,
including the statistics and the reading of clocks. It is measured for steps of one operation, and of 400 in
one plan.
"""

from __future__ import annotations

from argparse import Namespace

from common import native
from common.harness import Benchmark, Results


def measure(_: Namespace) -> Results:
    return {"nanoseconds": native.run("recorder")}


def tables(results: Results) -> list[str]:
    return [f"{step:>16}: {cost:6.1f} ns an operation" for step, cost in results["nanoseconds"].items()]


BENCHMARK = Benchmark(__doc__, [], measure, tables)

if __name__ == "__main__":
    BENCHMARK.main()
