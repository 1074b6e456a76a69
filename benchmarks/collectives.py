"""Compares every collective operation with its peers: its time among ranks of one machine.

    python benchmarks/collectives.py [-np 2] [--only broadcast alltoall] [--sizes 1K 64K 1M 16M]
    python benchmarks/collectives.py --only allreduce --sizes 4 1K 64K 1M 4M 16M 64M 256M --rounds 15
    python benchmarks/collectives.py --only allreduce --dtypes float32 bfloat16 --threads 1 2

sirtaki (from C, numpy and torch, and from C with tensors in memory that the ranks share), gloo, DeepSpeed's
all-reduce for CPUs, Open MPI and the memory-bound prototype take turns in blocks of calls, so that other load
on the machine affects them alike. A ratio is the median of the ratios of adjacent blocks. The results of
sirtaki's all-gather, reduce-scatter and all-to-all are new tensors, as Horovod's calls return them; the peers
write into an existing tensor. "C" is sirtaki's C functions, called through cffi on requests that have been
described in advance.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import product
from operator import itemgetter
from typing import Any

from common.harness import Benchmark, Results
from common.options import KIB, MIB, RANKS, Option, choice, rounds, sizes
from common.peer_jobs import BOUND, CORE, latency_tables, peer_jobs
from common.peers import OPERATIONS
from common.report import Row, Table, Target, at_least, at_most, readable

ALLREDUCE = "allreduce"
DTYPES = ["float32", "bfloat16", "float16"]
SIZES = [KIB, 64 * KIB, MIB, 16 * MIB]
SHARED_SPEEDS = {MIB: 3.5, 4 * MIB: 3.0, 16 * MIB: 2.2, 64 * MIB: 1.7}  # targets, times the bound's speed
JUDGED_FROM = 64 * KIB
SHARE = 0.7  # of the faster peer's speed
LAYERS = {"from C": "slower_than_core", "from Python": "slower"}
# The least ratios of an all-reduce's time to sirtaki's: peer, layer, range of sizes, bound, what.
PAIR_BOUNDS = [
    (BOUND, "slower_than_core", MIB, 256 * MIB, 0.8, "speed from C / memory bound's, ≥ 1 MiB"),
    (BOUND, "slower", MIB, 256 * MIB, 0.8, "speed from numpy / memory bound's, ≥ 1 MiB"),
    ("gloo", "slower", MIB, 16 * MIB, 10, "speed / gloo's, 1 to 16 MiB"),
    ("gloo", "slower", 64 * MIB, 64 * MIB, 5, "speed / gloo's, 64 MiB"),
    ("deepspeed", "slower", 64 * KIB, 64 * MIB, 1, "speed / DeepSpeed's, 64 KiB to 64 MiB"),
    ("mpi", "slower", MIB, 16 * MIB, 1.5, "speed / Open MPI's, 1 to 16 MiB"),
    ("mpi", "slower", 64 * MIB, 64 * MIB, 3, "speed / Open MPI's, 64 MiB"),
]
SMALL_BOUNDS = {CORE: 5.0, "sirtaki numpy": 15.0, "sirtaki torch": 15.0}  # microseconds, up to 1 KiB


def measure(options: Namespace) -> Results:
    rows: list[Row] = []
    for threads in options.threads:
        with peer_jobs(options.ranks, threads=threads) as jobs:
            for collective, dtype in product(options.only, options.dtypes):
                how: dict[str, Any] = {"dtype": dtype, "cold": collective == ALLREDUCE}
                for size in sizes_of(collective, options.sizes, options.ranks):
                    rows += jobs.measure(collective, size, options.rounds, **how)
    return {"versions": jobs.versions, "ranks": options.ranks, "rows": rows}


def sizes_of(collective: str, sizes: Sequence[int], ranks: int) -> list[int]:
    """Returns sizes for which each rank's part has whole elements. A barrier has no size."""
    if not OPERATIONS[collective].has_size:
        return [0]
    step = 4 * OPERATIONS[collective].parts(ranks)
    return [max(size // step, 1) * step for size in sizes]


def tables(results: Results) -> Iterator[Table]:
    return latency_tables(results["rows"], results["ranks"])


def judge(results: Results) -> list[Target]:
    rows = [row for row in results["rows"] if row["collective"] == ALLREDUCE]
    others = [row for row in results["rows"] if row["collective"] != ALLREDUCE]
    judged = judge_pairs(rows) if results["ranks"] == 2 else judge_crowd(rows, results["ranks"])
    return judged + judge_others(others, results["ranks"])


def judge_pairs(rows: Sequence[Row]) -> list[Target]:
    """Returns the targets of all-reduces of two ranks, for each dtype and number of threads."""
    kind = itemgetter("dtype", "threads")
    targets = []
    for how in dict.fromkeys(map(kind, rows)):
        targets += judge_pair([row for row in rows if kind(row) == how], *how)
    return targets


def judge_pair(rows: Sequence[Row], dtype: str, threads: int) -> list[Target]:
    """Returns the targets for a dtype and a number of threads; the worst size of a range counts."""
    targets = []
    how = f", {dtype}" * (dtype != DTYPES[0]) + f", {threads} threads" * (threads > 1)
    for who, layer, low, high, bound, what in PAIR_BOUNDS:
        if found := ratios(rows, who, layer, low, high):
            targets.append(at_least(what + how, bound, min(found)))
    for row in rows:
        if row["faster_than_bound"] and row["bytes"] in SHARED_SPEEDS:
            what = f"speed in shared memory / memory bound's, {readable(row['bytes'])}{how}"
            targets.append(at_least(what, SHARED_SPEEDS[row["bytes"]], row["faster_than_bound"].median))
    for who, microseconds in SMALL_BOUNDS.items():
        small = [row["median"] for row in rows if row["who"] == who and row["bytes"] <= KIB]
        if small:
            targets.append(at_most(f"all-reduce ≤ 1 KiB, {who}{how}", microseconds, max(small), "µs"))
    return targets


def judge_crowd(rows: Sequence[Row], ranks: int) -> list[Target]:
    found = ratios(rows, "mpi", "slower", JUDGED_FROM, 256 * MIB)
    what = f"{ranks} ranks, ≥ 64 KiB, time / Open MPI's"
    return [at_most(what, 1.3, 1 / min(found), "×")] if found else []


def judge_others(rows: Sequence[Row], ranks: int) -> list[Target]:
    """Returns the target of each operation at the size at which the faster peer leads by most."""
    targets = []
    for collective in dict.fromkeys(row["collective"] for row in rows):
        judged = [row for row in rows if row["collective"] == collective and row["bytes"] >= JUDGED_FROM]
        for layer, key in LAYERS.items():
            found = [(row[key].median, row["bytes"]) for row in judged if row[key]]
            if found:
                share, size = min(found)
                what = f"{collective}, {ranks} ranks, speed {layer} / the better peer's, at {readable(size)}"
                targets.append(at_least(what, SHARE, share))
    return targets


def ratios(rows: Sequence[Row], who: str, layer: str, low: int, high: int) -> list[float]:
    """Returns the ratios of an implementation's times to sirtaki's, in a range of sizes."""
    own = [row for row in rows if row["who"] == who and low <= row["bytes"] <= high]
    return [row[layer].median for row in own if row[layer]]


OTHERS = [name for name in OPERATIONS if name != ALLREDUCE]
ONLY = choice("--only", list(OPERATIONS), f"these operations (all but {ALLREDUCE})", default=OTHERS)
OPTIONS = [
    RANKS,
    sizes(SIZES),
    rounds(11, "blocks of each"),
    ONLY,
    choice("--dtypes", DTYPES, "with elements of these types (float32)", default=DTYPES[:1]),
    Option("--threads", type=int, nargs="+", default=[1], help="of each rank (1); a job for each number"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
