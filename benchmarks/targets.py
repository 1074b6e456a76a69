"""Runs a short version of every benchmark, and reports which targets are met.

Usage: python benchmarks/targets.py [--longer] [--json FILE]
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import allreduce
import collectives
import startup
import train_step
from common.harness import Benchmark, Results
from common.options import KIB, MIB, Option
from common.report import Target

PAIR_SIZES = [4, KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
CROWD = 4
CROWD_SIZES = [64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
# Each benchmark with its rounds and further options.
PARTS: dict[str, tuple[Benchmark, int, dict[str, Any]]] = {
    "allreduce, 2 ranks": (allreduce.BENCHMARK, 7, {"ranks": 2, "sizes": PAIR_SIZES}),
    f"allreduce, {CROWD} ranks": (allreduce.BENCHMARK, 7, {"ranks": CROWD, "sizes": CROWD_SIZES}),
    "collectives, 2 ranks": (collectives.BENCHMARK, 5, {"ranks": 2}),
    f"collectives, {CROWD} ranks": (collectives.BENCHMARK, 5, {"ranks": CROWD}),
    "train_step": (train_step.BENCHMARK, 20, {}),
    "startup": (startup.BENCHMARK, 3, {}),
}


def measure(options: Namespace) -> Results:
    """Runs and shows one benchmark after the other."""
    factor = 3 if options.longer else 1
    return {
        title: benchmark.run(rounds=rounds * factor, **settings)
        for title, (benchmark, rounds, settings) in PARTS.items()
    }


def judge(results: Results) -> list[Target]:
    return [target for title, (part, *_) in PARTS.items() for target in part.judge(results[title])]


LONGER = Option("--longer", action="store_true", help="three times as many measurements")
BENCHMARK = Benchmark(__doc__, [LONGER], measure, judge=judge)

if __name__ == "__main__":
    BENCHMARK.main()
