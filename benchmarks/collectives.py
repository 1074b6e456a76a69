"""Compares every collective operation with its peers: its time among ranks of one machine.

    python benchmarks/collectives.py [-np 2] [--only broadcast alltoall] [--sizes 1K 64K 1M 16M]

sirtaki (from numpy and torch), gloo and Open MPI take turns in blocks of calls, so that other load on the
machine affects them alike. A ratio is the median of the ratios of adjacent blocks. The results of sirtaki's
all-gather, reduce-scatter and all-to-all are new tensors, as Horovod's calls return them; the peers write
into an existing tensor. "core" is sirtaki's C functions, called through cffi on requests that have been
described in advance.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from common import native
from common.collectives import COLLECTIVES
from common.measure import Interval
from common.options import KIB, MIB, add_sizes, parser
from common.report import Target, at_least, readable, save, show_machine, show_targets
from common.turns import Row, show_rows, show_versions, turns

SIZES = [KIB, 64 * KIB, MIB, 16 * MIB]
OTHERS = [name for name in COLLECTIVES if name != "allreduce"]  # all-reduce has a benchmark of its own
JUDGED_FROM = 64 * KIB
SHARE = 0.7  # of the faster peer's speed


def main() -> None:
    options = arguments()
    show_machine()
    results, rows = measure(options.ranks, options.only, options.sizes, options.rounds)
    show(results["versions"], rows, options.ranks)
    targets = judge(rows, options.ranks)
    show_targets(targets)
    save(options.json, results, targets)


def arguments() -> argparse.Namespace:
    made = parser(__doc__, 11, "blocks of each")
    add_sizes(made, SIZES)
    made.add_argument("--only", nargs="+", choices=OTHERS, default=OTHERS, help="these operations")
    return made.parse_args()


def measure(
    ranks: int, collectives: list[str], sizes: list[int], rounds: int
) -> tuple[dict[str, Any], list[Row]]:
    """Runs everything. Returns the contents of the JSON file, and the rows."""
    rows: list[Row] = []
    with turns(ranks, native.build()) as started:
        for collective in collectives:
            for size in sizes_of(collective, sizes, ranks):
                rows += started.measure(collective, size, rounds)
    return {"versions": started.versions, "ranks": ranks, "rows": [asdict(row) for row in rows]}, rows


def sizes_of(collective: str, sizes: list[int], ranks: int) -> list[int]:
    """Returns sizes for which each rank's part has whole elements. A barrier has no size."""
    if collective == "barrier":
        return [0]
    step = 4 * ranks
    return [max(size // step, 1) * step for size in sizes]


def show(versions: dict[str, str], rows: list[Row], ranks: int) -> None:
    show_versions(versions)
    for collective in dict.fromkeys(row.collective for row in rows):
        show_rows([row for row in rows if row.collective == collective], ranks)


def judge(rows: list[Row], ranks: int) -> list[Target]:
    """Returns the target of each operation at the size at which the faster peer leads by most."""
    targets = []
    layers: dict[str, Callable[[Row], Interval | None]] = {
        "from C": lambda row: row.slower_than_core,
        "from Python": lambda row: row.slower,
    }
    for collective in dict.fromkeys(row.collective for row in rows):
        judged = [row for row in rows if row.collective == collective and row.bytes >= JUDGED_FROM]
        for layer, ratio in layers.items():
            found: dict[int, float] = {}
            for row in judged:
                slower = ratio(row)
                if slower:
                    found[row.bytes] = min(found.get(row.bytes, slower.median), slower.median)
            if found:
                worst = min(found, key=lambda size: found[size])
                what = f"{collective}, {ranks} ranks, speed {layer} / the better peer's, at {readable(worst)}"
                targets.append(at_least(what, SHARE, found[worst]))
    return targets


if __name__ == "__main__":
    main()
