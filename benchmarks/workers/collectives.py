"""A rank of benchmarks/allreduce.py and collectives.py: measures blocks of calls of the ordered peer.

Usage: python -m workers.collectives SOCKET hvdrun|mpirun NATIVE_FOLDER
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from pathlib import Path

from common.collectives import COLLECTIVES, Array, Call, check, pattern
from common.measure import timed
from common.memory_bound import MemoryBound
from common.peers import OpenMPI, Peer, Sirtaki, TorchDistributed
from common.serving import bind, serve

WARM_UP_CALLS = 2
PAUSE_SECONDS = 0.005  # enough for an engine to fall asleep


class Prototype(Peer):
    """The memory-bound prototype."""

    version = "memory-bound prototype"

    def __init__(self, bound: MemoryBound, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._bound = bound

    def allreduce(self, array: Array) -> Call:
        call = self._bound.bind([array.ctypes.data], [array.size])

        def run() -> Array:
            call()
            return array

        return run


class Rank:
    """The orders that a rank executes."""

    def __init__(self, peers: dict[str, Peer], barrier: Call | None) -> None:
        self._peers, self._barrier = peers, barrier
        self._calls: dict[str, Call] = {}

    def versions(self) -> dict[str, str]:
        """Returns the available peers and their versions."""
        return {name: peer.version for name, peer in self._peers.items()}

    def prepare(self, collective: str, size: int) -> list[str]:
        """Checks `size` bytes with each peer and prepares the measurement. Returns the peers offering it."""
        self._calls.clear()
        for name, peer in self._peers.items():
            count = size // 4
            array = pattern(COLLECTIVES[collective].input_count(count, peer.size), peer.rank)
            call = peer.bind(collective, array)
            if call is None:
                continue
            check(collective, call(), count, peer.rank, peer.size)
            array[:] = 0  # zeros stay zeros, however often they are summed in place
            self._calls[name] = call
        return list(self._calls)

    def block(self, who: str, calls: int) -> list[float]:
        """Returns the duration of each of `calls` calls, in microseconds, without the warm-up calls."""
        call = self._calls[who]
        timed(call, WARM_UP_CALLS)
        return timed(call, calls)

    def cold(self, who: str, calls: int) -> list[float]:
        """Measures calls after a pause. The ranks wake at different times, so a barrier precedes the call."""
        assert self._barrier is not None
        times = []
        for _ in range(calls):
            time.sleep(PAUSE_SECONDS)
            self._barrier()
            times += timed(self._calls[who], 1)
        return times


def of_hvdrun(path: str, native: Path) -> tuple[Rank, int]:
    """Returns sirtaki, gloo and the memory-bound prototype in one process."""
    from common.core import Core

    import sirtaki.numpy as hvd
    from sirtaki.bindings.default_context import current

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    bound = MemoryBound(native, rank, size, partial(hvd.broadcast_object, root_rank=0))
    peers: dict[str, Peer] = {
        "sirtaki core": Core(current()),
        "sirtaki numpy": Sirtaki("numpy", rank, size),
    }
    try:
        peers["sirtaki torch"] = Sirtaki("torch", rank, size)
        peers["gloo"] = TorchDistributed("gloo", rank, size, Path(path).parent)
    except ImportError:
        print("no torch here: gloo and sirtaki.torch are left out", file=sys.stderr)
    peers["memory bound"] = Prototype(bound, rank, size)
    bind(rank, size)
    return Rank(peers, bound.barrier), rank


def of_mpirun() -> tuple[Rank, int]:
    """Returns MPI alone: its launcher starts the ranks."""
    mpi = OpenMPI()
    return Rank({"mpi": mpi}, None), mpi.rank


def main() -> None:
    path, launcher, native = sys.argv[1:]
    rank, number = of_mpirun() if launcher == "mpirun" else of_hvdrun(path, Path(native))
    gc.disable()
    serve(path, number, rank)


if __name__ == "__main__":
    main()
