"""Measures collectives under disturbances, beside gloo, Open MPI and the limit prototype in the same run.

    python benchmarks/robustness.py [--only neighbour quota ...] [--sizes 1K 1M 16M] [--json FILE]

Each condition has its own ranks: a busy neighbour on one core, memory that another process copies, a quota of
1.5 cores, more ranks than cores, and settings other than the defaults. The criteria are the time relative to
the faster peer's under the same condition, and whether there is a cliff: twice the bytes take more than 2.5
times as long.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from common import native
from common.disturbances import DISTURBANCES, Disturbance, NotPossible
from common.options import KIB, MIB, add_sizes, parser
from common.report import Target, at_most, readable, save, show_machine, show_table, show_targets
from common.turns import Row, show_versions, turns

ALLREDUCE_SIZES = [KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
MOVES = ("broadcast", "allgather", "alltoall", "sendrecv")
MOVE_SIZES = (64 * KIB, 4 * MIB)
PEERS = ("gloo", "mpi")
LAYERS = ("sirtaki core", "sirtaki torch")
SHOWN = (*LAYERS, "gloo", "mpi", "limit")
MOST = 1.3  # times the faster peer's time
CLIFF = 2.5  # times as long for twice the bytes


def main() -> None:
    options = arguments()
    show_machine()
    results: dict[str, Any] = {"conditions": {}}
    targets: list[Target] = []
    for disturbance in DISTURBANCES:
        if options.only and disturbance.name not in options.only:
            continue
        try:
            versions, rows = measure(disturbance, options)
        except NotPossible as reason:
            print(f"{disturbance.name} is left out: {reason}")
            results["conditions"][disturbance.name] = {"left_out": str(reason)}
            continue
        if not results.get("versions"):
            results["versions"] = versions
            show_versions(versions)
        show(disturbance, rows)
        targets += judge(disturbance.name, rows)
        results["conditions"][disturbance.name] = {
            "ranks": disturbance.ranks,
            "rows": [asdict(row) for row in rows],
            "cliffs": cliffs(rows),
        }
    show_targets(targets)
    save(options.json, results, targets)


def arguments() -> argparse.Namespace:
    made = parser(__doc__, 6, "blocks of each")
    add_sizes(made, ALLREDUCE_SIZES)
    names = [one.name for one in DISTURBANCES]
    made.add_argument("--only", nargs="+", choices=names, help="conditions to measure (all)")
    made.add_argument("--no-moves", action="store_true", help="all-reduce only")
    return made.parse_args()


def measure(disturbance: Disturbance, options: argparse.Namespace) -> tuple[dict[str, str], list[Row]]:
    """Returns all rows under one condition."""
    folder = native.build()
    rows: list[Row] = []
    with disturbance.beside(), turns(disturbance.ranks, folder, disturbance.settings) as started:
        for size in options.sizes:
            rows += started.measure("allreduce", size, options.rounds)
        for move in () if options.no_moves else MOVES:
            for size in MOVE_SIZES:
                rows += started.measure(move, size, options.rounds)
        return started.versions, rows


def show(disturbance: Disturbance, rows: list[Row]) -> None:
    """Prints one condition's table, and its cliffs."""
    table = []
    for collective, size in dict.fromkeys((row.collective, row.bytes) for row in rows):
        found = {row.who: row for row in rows if (row.collective, row.bytes) == (collective, size)}
        times = [f"{found[who].median:,.1f}" if who in found else "" for who in SHOWN]
        worst = found[LAYERS[0]].p99 / found[LAYERS[0]].median
        table.append([collective, readable(size), *times, *_ratios(found), f"{worst:.1f}"])
    head = ["operation", "size", *SHOWN, "core / peer", "torch / peer", "core p99 / median"]
    show_table(f"{disturbance.what}: medians in µs", head, table, text_columns=2)
    for cliff in cliffs(rows):
        print(f"a cliff: {cliff}")


def _ratios(found: dict[str, Row]) -> list[str]:
    ratios = (beside_peers(found, layer) for layer in LAYERS)
    return ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]


def beside_peers(found: dict[str, Row], layer: str) -> float | None:
    """Returns a layer's time as a multiple of the faster peer's; None without a peer."""
    peers = [found[who].median for who in PEERS if who in found]
    return found[layer].median / min(peers) if peers and layer in found else None


def cliffs(rows: list[Row]) -> list[str]:
    """Lists the sizes from which sirtaki takes more than CLIFF times as long for twice the bytes.

    Each entry includes the limit's times, because the memory system has cliffs of its own, where caches end.
    """
    said = []
    limits = {r.bytes: r.median for r in rows if (r.who, r.collective) == ("limit", "allreduce")}
    for layer in LAYERS:
        own = sorted(
            (r for r in rows if r.who == layer and r.collective == "allreduce"), key=lambda r: r.bytes
        )
        for low, high in pairwise(own):
            doublings = math.log2(high.bytes / low.bytes)
            if high.median > low.median * CLIFF**doublings:
                times = _times(low.median, high.median)
                limit = _times(limits[low.bytes], limits[high.bytes])
                sizes = f"{readable(low.bytes)} to {readable(high.bytes)}"
                said.append(f"{layer} from {sizes}: {times} (limit: {limit})")
    return said


def _times(low: float, high: float) -> str:
    return f"{low:,.0f} to {high:,.0f} µs"


def judge(condition: str, rows: list[Row]) -> list[Target]:
    """Returns the worst row relative to the faster peer, by kind of operation and layer."""
    targets = []
    kinds = {"all-reduce": ["allreduce"], "moves": list(MOVES)}
    for kind, collectives in kinds.items():
        for layer in LAYERS:
            ratios = {}
            for place in dict.fromkeys((row.collective, row.bytes) for row in rows):
                found = {row.who: row for row in rows if (row.collective, row.bytes) == place}
                ratio = beside_peers(found, layer)
                if place[0] in collectives and ratio is not None:
                    ratios[place] = ratio
            if ratios:
                worst = max(ratios, key=lambda place: ratios[place])
                what = f"{condition}: {kind}, {layer} / the better peer, at {worst[0]} {readable(worst[1])}"
                targets.append(at_most(what, MOST, ratios[worst], "×"))
    return targets


if __name__ == "__main__":
    main()
