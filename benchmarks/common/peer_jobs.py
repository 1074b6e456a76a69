"""The jobs of sirtaki and its peers on one machine, and their measurement in alternating blocks of calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from common import native
from common.jobs import Job, hvdrun, mpirun
from common.latency import Row, compare, make_rows
from common.measure import alternate, block_calls, median
from common.options import MIB

BYTES_PER_BLOCK = 32 * MIB
LEAST_CALLS, MOST_CALLS = 4, 64
COLD_CALLS, COLD_UP_TO = 20, MIB
WORKER = "workers.collectives"
CORE = "sirtaki core"
# The baseline of each comparison: the same layer of sirtaki.
SAME_LAYER = {"gloo": "sirtaki torch", "mpi": "sirtaki numpy", "memory bound": "sirtaki numpy"}


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
            row.slower_than_core = compare(blocks, row.who, CORE) if row.who in SAME_LAYER else None
            if cold and row.who.startswith("sirtaki") and size <= COLD_UP_TO:
                row.cold = median(owners[row.who].slowest("cold", who=row.who, calls=COLD_CALLS))
        return rows


@contextmanager
def peer_jobs(ranks: int, settings: Mapping[str, str] | None = None) -> Iterator[PeerJobs]:
    """Starts the ranks, and ends them. `settings` are added to the environment of sirtaki's ranks."""
    folder = str(native.build())
    with ExitStack() as stack:
        own = Job(hvdrun(ranks), ranks, WORKER, "hvdrun", folder, settings=settings)
        jobs = [stack.enter_context(own)]
        launcher = mpirun(ranks)
        if launcher is None:
            print(
                "no mpirun with mpi4py: MPI is left out (Debian: apt install openmpi-bin; pip install mpi4py)"
            )
        else:
            jobs.append(stack.enter_context(Job(launcher, ranks, WORKER, "mpirun", folder)))
        yield PeerJobs(jobs, ranks)
