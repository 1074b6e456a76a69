"""Measures collectives under disturbances, beside gloo, Open MPI and the memory-bound prototype.

    python benchmarks/robustness.py [--only neighbour quota ...] [--sizes 1K 1M 16M] [--json FILE]

Each condition has its own ranks: a busy neighbour on one core, memory that another process copies, a quota of
1.5 cores, more ranks than cores, and settings other than the defaults. The criteria are the time relative to
the faster peer's under the same condition, and whether there is a cliff: twice the bytes take more than 2.5
times as long.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

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
QUOTA_CORES = 1.5
PERIOD_MICROSECONDS = 100_000
GROUPS = Path("/sys/fs/cgroup")
COUNTING = "while True: pass"
COPYING = f"""
import numpy
source = numpy.ones({256 * MIB // 8})
target = numpy.empty_like(source)
while True: numpy.copyto(target, source)
"""


class NotPossible(Exception):
    """The system does not allow the disturbance; the text names the reason."""


@dataclass(frozen=True)
class Disturbance:
    """One condition to measure under: the load beside the ranks, the number of ranks, their settings."""

    name: str
    what: str
    beside: Callable[[], AbstractContextManager[None]] = nullcontext
    ranks: int = 2
    settings: dict[str, str] = field(default_factory=dict)  # sirtaki's settings, passed in its environment


@contextmanager
def program(code: str, core: int | None = None) -> Iterator[None]:
    """Runs Python code during the context, on the given core if there is one."""
    binding = "" if core is None else f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    process = subprocess.Popen([sys.executable, "-c", binding + code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def busy_neighbour() -> AbstractContextManager[None]:
    """Runs a process that computes all the time on the first core."""
    return program(COUNTING, min(os.sched_getaffinity(0)))


def busy_memory() -> AbstractContextManager[None]:
    """Runs a process that copies 256 MiB in a loop, on any core."""
    return program(COPYING)


@contextmanager
def quota() -> Iterator[None]:
    """Limits processes that are started during the context to QUOTA_CORES cores, by a control group."""
    is_second_version = (GROUPS / "cgroup.controllers").exists()
    root = GROUPS if is_second_version else GROUPS / "cpu"
    limit, group = int(QUOTA_CORES * PERIOD_MICROSECONDS), root / f"sirtaki-benchmark-{os.getpid()}"
    with ExitStack() as stack:
        try:
            if is_second_version:
                (root / "cgroup.subtree_control").write_text("+cpu")
            group.mkdir()
            stack.callback(group.rmdir)
            if is_second_version:
                (group / "cpu.max").write_text(f"{limit} {PERIOD_MICROSECONDS}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
                (group / "cpu.cfs_quota_us").write_text(str(limit))
            before = root / _own_group()
            _enter(group)
        except OSError as error:
            raise NotPossible(f"no control group can be made here: {error}") from error
        stack.callback(_enter, before)  # leaves the group; children have ended, so it is empty then
        yield


def _own_group() -> str:
    """Returns the path of this process's control group, in the hierarchy of the processors."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = [path for _, controllers, path in lines if "cpu" in controllers.split(",") or not controllers]
    return paths[0].lstrip("/")


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


DISTURBANCES = (
    Disturbance("none", "2 ranks, nothing else"),
    Disturbance("neighbour", "a busy neighbour on one core", busy_neighbour),
    Disturbance("memory", "another process copies memory", busy_memory),
    Disturbance("quota", f"a quota of {QUOTA_CORES} cores", quota),
    Disturbance("4 ranks", "4 ranks", ranks=4),
    Disturbance("8 ranks", "8 ranks", ranks=8),
    Disturbance("small chunks", "chunks of 64 KiB", settings={"SIRTAKI_CHUNK_BYTES": "64K"}),
    Disturbance("large chunks", "chunks of 2 MiB", settings={"SIRTAKI_CHUNK_BYTES": "2M"}),
    Disturbance("little polling", "spin 20 µs", settings={"SIRTAKI_SPIN": "0.00002"}),
    Disturbance("much polling", "spin 5 ms", settings={"SIRTAKI_SPIN": "0.005"}),
)


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
