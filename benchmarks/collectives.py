"""Compares every collective operation with its peers: its time among ranks of one machine.

    python benchmarks/collectives.py [-np 2] [--only broadcast alltoall] [--sizes 1K 64K 1M 16M]

sirtaki (from numpy and torch), gloo and Open MPI take turns in blocks of calls, so that other load on the
machine affects them alike. A ratio is the median of the ratios of adjacent blocks. The results of sirtaki's
all-gather, reduce-scatter and all-to-all are new tensors, as Horovod's calls return them; the peers write
into an existing tensor. "core" is sirtaki's C functions, called through cffi on requests that have been
described in advance.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

from common.collectives import COLLECTIVES
from common.harness import Benchmark, Results
from common.latency import Row, show_latency
from common.measure import Interval
from common.options import KIB, MIB, RANKS, choice, rounds, sizes
from common.peer_jobs import peer_jobs
from common.report import Target, at_least, readable

SIZES = [KIB, 64 * KIB, MIB, 16 * MIB]
OTHERS = [name for name in COLLECTIVES if name != "allreduce"]  # all-reduce has a benchmark of its own
JUDGED_FROM = 64 * KIB
SHARE = 0.7  # of the faster peer's speed
LAYERS: dict[str, Callable[[Row], Interval | None]] = {
    "from C": lambda row: row.slower_than_core,
    "from Python": lambda row: row.slower,
}


def measure(options: Namespace) -> Results:
    rows: list[Row] = []
    with peer_jobs(options.ranks) as jobs:
        for collective in options.only:
            for size in sizes_of(collective, options.sizes, options.ranks):
                rows += jobs.measure(collective, size, options.rounds)
    return {"versions": jobs.versions, "ranks": options.ranks, "rows": rows}


def show(results: Results) -> None:
    show_latency(results["rows"], results["ranks"])


def sizes_of(collective: str, sizes: Sequence[int], ranks: int) -> list[int]:
    """Returns sizes for which each rank's part has whole elements. A barrier has no size."""
    if collective == "barrier":
        return [0]
    step = 4 * ranks
    return [max(size // step, 1) * step for size in sizes]


def judge(results: Results) -> list[Target]:
    """Returns the target of each operation at the size at which the faster peer leads by most."""
    targets = []
    for collective in dict.fromkeys(row.collective for row in results["rows"]):
        judged = [row for row in results["rows"] if row.collective == collective and row.bytes >= JUDGED_FROM]
        for layer, slower in LAYERS.items():
            found = [(interval.median, row.bytes) for row in judged if (interval := slower(row))]
            if found:
                share, size = min(found)
                where = f"{layer} / the better peer's, at {readable(size)}"
                targets.append(
                    at_least(f"{collective}, {results['ranks']} ranks, speed {where}", SHARE, share)
                )
    return targets


OPTIONS = [RANKS, sizes(SIZES), rounds(11, "blocks of each"), choice("--only", OTHERS, "these operations")]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
