"""A rank's side of a job: executes the orders of common.jobs.Job.

Usage: python -m common.serving MODULE:CLASS SOCKET ARGUMENTS...

The class, whose methods are the orders, is made with the folder of the job and the arguments. Its attribute
`number` is the rank.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.measure import timed


class CompiledCalls:
    """A rank's prepared functions, by implementation. A block warms up for as long as it measures."""

    LEAST_WARM_UP = 3  # calls

    def __init__(self) -> None:
        self.calls: dict[str, Callable[[], Any]] = {}

    def block(self, who: str, calls: int) -> list[float]:
        """Returns the duration of each of `calls` calls, in microseconds, without the warm-up calls."""
        timed(self.calls[who], max(self.LEAST_WARM_UP, calls))
        return timed(self.calls[who], calls)


def bind(rank: int, size: int) -> None:
    """Binds a rank's threads, which the caller starts, to cores of their own if there are enough cores, as
    mpirun does for its ranks.

    Otherwise two ranks that wake each other may or may not share a core, by chance. Call it after sirtaki and
    gloo have started their threads, which may run on any core.
    """
    cores, threads = sorted(os.sched_getaffinity(0)), int(os.environ["OMP_NUM_THREADS"])
    if size * threads <= len(cores):
        os.sched_setaffinity(0, cores[rank * threads : (rank + 1) * threads])


def serve(path: str, rank: Any) -> None:
    """Executes the orders that a rank receives, as methods of `rank`, until the connection ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rwb")
        answer: Any = {"rank": rank.number}
        while True:
            stream.write((json.dumps(answer) + "\n").encode())
            stream.flush()
            line = stream.readline()
            if not line:
                return
            received = json.loads(line)
            answer = getattr(rank, received["order"])(**received["arguments"])


def main() -> None:
    worker, path, *arguments = sys.argv[1:]
    module, _, name = worker.partition(":")
    rank = getattr(importlib.import_module(module), name)(Path(path).parent, *arguments)
    gc.disable()
    serve(path, rank)


if __name__ == "__main__":
    main()
