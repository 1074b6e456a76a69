"""Runs a short version of every benchmark, and reports which targets are met.

Usage: python benchmarks/targets.py [--longer] [--json FILE]
"""

from __future__ import annotations

import argparse
from typing import Any

import allreduce
import collectives
import startup
import train_step
from common.options import KIB, MIB, add_json
from common.report import Target, save, show_machine, show_targets

PAIR_SIZES = [4, KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
CROWD = 4
CROWD_SIZES = [64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
COLLECTIVE_SIZES = [KIB, 64 * KIB, MIB, 16 * MIB]


def main() -> None:
    options = arguments()
    show_machine()
    results, targets = measure(3 if options.longer else 1)
    show_targets(targets)
    save(options.json, results, targets)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--longer", action="store_true", help="three times as many measurements")
    add_json(parser)
    return parser.parse_args()


def measure(factor: int) -> tuple[dict[str, Any], list[Target]]:
    """Runs and shows one benchmark after the other."""
    results: dict[str, Any] = {}
    targets: list[Target] = []
    for ranks, sizes in ((2, PAIR_SIZES), (CROWD, CROWD_SIZES)):
        found, rows = allreduce.measure(ranks, sizes, 7 * factor)
        allreduce.show(found["versions"], rows, ranks)
        results[f"allreduce, {ranks} ranks"] = found
        targets += allreduce.judge(rows, ranks)
    for ranks in (2, CROWD):
        found, rows = collectives.measure(ranks, collectives.OTHERS, COLLECTIVE_SIZES, 5 * factor)
        collectives.show(found["versions"], rows, ranks)
        results[f"collectives, {ranks} ranks"] = found
        targets += collectives.judge(rows, ranks)
    steps = train_step.measure(20 * factor)
    train_step.show(steps)
    targets += train_step.judge(steps)
    start = startup.measure(3 * factor)
    startup.show(start)
    targets += startup.judge(start)
    return {**results, "train_step": steps, "startup": start}, targets


if __name__ == "__main__":
    main()
