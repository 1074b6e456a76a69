"""Measures collectives under disturbances, beside gloo, Open MPI and the memory-bound prototype.

    python benchmarks/robustness.py [--only neighbour quota ...] [--sizes 1K 1M 16M] [--json FILE]

Each condition has its own ranks: a busy neighbour on one core, memory that another process copies, a quota of
1.5 cores, more ranks than cores, and settings other than the defaults. The criteria are the time relative to
the faster peer's under the same condition, and whether there is a cliff: twice the bytes take more than 2.5
times as long.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from common.disturbances import DISTURBANCES, Disturbance, NotPossible
from common.harness import Benchmark, Results
from common.options import KIB, MIB, Option, choice, rounds, sizes
from common.peer_jobs import BOUND, CORE, peer_jobs
from common.report import Row, Table, Target, at_most, optional, readable

ALLREDUCE_SIZES = [KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
MOVES = ("broadcast", "allgather", "alltoall", "sendrecv")
KINDS = {"all-reduce": ("allreduce",), "moves": MOVES}
MOVE_SIZES = (64 * KIB, 4 * MIB)
PEERS = ("gloo", "mpi")
LAYERS = (CORE, "sirtaki torch")
SHOWN = (*LAYERS, *PEERS, BOUND)
MOST = 1.3  # times the faster peer's time
CLIFF = 2.5  # times as long for twice the bytes


def measure(options: Namespace) -> Results:
    """Measures under each condition, and shows its table at once: all of them take minutes."""
    versions: dict[str, str] = {}
    conditions: dict[str, Any] = {}
    for disturbance in DISTURBANCES:
        if disturbance.name not in options.only:
            continue
        try:
            found, rows = measure_under(disturbance, options)
        except NotPossible as reason:
            print(f"{disturbance.name} is left out: {reason}")
            conditions[disturbance.name] = {"left_out": str(reason)}
            continue
        versions = versions or found
        show(disturbance, rows)
        conditions[disturbance.name] = {"ranks": disturbance.ranks, "rows": rows, "cliffs": cliffs(rows)}
    return {"versions": versions, "conditions": conditions}


def measure_under(disturbance: Disturbance, options: Namespace) -> tuple[dict[str, str], list[Row]]:
    """Returns all rows under one condition."""
    places = [("allreduce", size) for size in options.sizes]
    if options.moves:
        places += [(move, size) for move in MOVES for size in MOVE_SIZES]
    with disturbance.beside(), peer_jobs(disturbance.ranks, disturbance.settings) as jobs:
        rows = [row for place in places for row in jobs.measure(*place, options.rounds)]
        return jobs.versions, rows


def by_place(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, Row]]:
    """Groups the rows by operation and size, then by implementation."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["collective"], row["bytes"]), {})[row["who"]] = row
    return found


def show(disturbance: Disturbance, rows: Sequence[Row]) -> None:
    """Prints one condition's table, and its cliffs."""
    table = []
    for (collective, size), found in by_place(rows).items():
        times = [f"{found[who]['median']:,.1f}" if who in found else "" for who in SHOWN]
        ratios = [optional(beside_peers(found, layer), ".2f") for layer in LAYERS]
        worst = found[CORE]["p99"] / found[CORE]["median"]
        table.append([collective, readable(size), *times, *ratios, f"{worst:.1f}"])
    head = ["operation", "size", *SHOWN, "C / peer", "torch / peer", "C's p99 / median"]
    Table(f"{disturbance.what}: medians in µs", head, table, text_columns=2).print()
    for cliff in cliffs(rows):
        print(f"a cliff: {cliff}")


def beside_peers(found: dict[str, Row], layer: str) -> float | None:
    """Returns a layer's time as a multiple of the faster peer's; None without a peer."""
    peers = [found[who]["median"] for who in PEERS if who in found]
    return found[layer]["median"] / min(peers) if peers and layer in found else None


def cliffs(rows: Sequence[Row]) -> list[str]:
    """Lists the sizes from which sirtaki takes more than CLIFF times as long for twice the bytes.

    Each entry includes the prototype's times, because the memory system has cliffs of its own, where caches
    end.
    """
    listed = []
    sums = [found for (collective, _), found in sorted(by_place(rows).items()) if collective == "allreduce"]
    for layer in LAYERS:
        for low, high in pairwise(found for found in sums if layer in found):
            size, larger = low[layer]["bytes"], high[layer]["bytes"]
            if high[layer]["median"] > low[layer]["median"] * CLIFF ** math.log2(larger / size):
                times, bound = (_times(low[who], high[who]) for who in (layer, BOUND))
                listed.append(
                    f"{layer} from {readable(size)} to {readable(larger)}: {times} (memory bound: {bound})"
                )
    return listed


def _times(low: Row, high: Row) -> str:
    return f"{low['median']:,.0f} to {high['median']:,.0f} µs"


def judge(results: Results) -> list[Target]:
    """Returns the worst row relative to the faster peer, by condition, kind of operation and layer."""
    targets = []
    for condition, measured in results["conditions"].items():
        places = by_place(measured.get("rows", []))
        for kind, collectives in KINDS.items():
            for layer in LAYERS:
                ratios = [
                    (ratio, collective, size)
                    for (collective, size), found in places.items()
                    if collective in collectives and (ratio := beside_peers(found, layer)) is not None
                ]
                if ratios:
                    ratio, collective, size = max(ratios)
                    what = f"{kind}, {layer} / the better peer, at {collective} {readable(size)}"
                    targets.append(at_most(f"{condition}: {what}", MOST, ratio, "×"))
    return targets


OPTIONS = [
    sizes(ALLREDUCE_SIZES),
    rounds(6, "blocks of each"),
    choice("--only", [one.name for one in DISTURBANCES], "conditions to measure (all)"),
    Option("--no-moves", dest="moves", action="store_false", help="all-reduce only"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, judge=judge)

if __name__ == "__main__":
    BENCHMARK.main()
