"""A rank of benchmarks/scale.py: becomes a rank when it is told to, and reports the cost.

Usage: python -m workers.scale SOCKET
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

from common.serving import serve

import sirtaki.numpy as hvd
from sirtaki.bindings.bootstrap import memory, world_builder
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.context import Context

# The parts of init(): the owner of a function, and its name there.
PHASES: dict[str, tuple[Any, str]] = {
    "join": (RendezvousClient, "connect"),
    "gather": (RendezvousClient, "all_gather"),
    "links": (world_builder, "connect_all"),
    "memory": (memory.MemoryLinks, "exchange"),
    "start": (Context, "start"),
}


class Rank:
    """The orders that a rank executes."""

    def __init__(self) -> None:
        hvd.init(rank=0, size=1)  # imports everything that init() needs
        hvd.shutdown()
        self._phases: dict[str, list[float]] = {}
        for phase, (owner, name) in PHASES.items():
            setattr(owner, name, self._timed(phase, getattr(owner, name)))

    def start(self) -> dict[str, Any]:
        """Returns the moments at which init() began and ended, the seconds of its phases (elapsed, and of the
        processor), and what init() has opened and kept.
        """
        self._phases = {phase: [0.0, 0.0] for phase in PHASES}
        descriptors, resident = count_descriptors(), private_bytes()
        began, processor = time.monotonic(), time.process_time()
        hvd.init()
        ended, processor = time.monotonic(), time.process_time() - processor
        opened = {"descriptors": count_descriptors() - descriptors, "bytes": private_bytes() - resident}
        return {"began": began, "ended": ended, "processor": processor, "phases": self._phases, **opened}

    def first(self) -> float:
        """Returns the seconds that the first all-reduce takes."""
        began = time.perf_counter()
        assert hvd.allreduce(1.0, op=hvd.Sum, name="first") == hvd.size()
        return time.perf_counter() - began

    def _timed(self, phase: str, function: Any) -> Any:
        @functools.wraps(function)
        def measured(*arguments: Any, **options: Any) -> Any:
            elapsed, processor = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                total = self._phases[phase]
                total[0] += time.perf_counter() - elapsed
                total[1] += time.thread_time() - processor

        return measured


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def private_bytes() -> int:
    """Returns the memory that is this process's own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    serve(sys.argv[1], int(os.environ["SIRTAKI_RANK"]), Rank())
