"""A rank's side of a job: executes the orders of common.jobs.Job."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Binds the calling thread to a core of its own if there are enough cores, as mpirun does for its ranks.

    Otherwise two ranks that wake each other may or may not share a core, by chance. Call it after sirtaki and
    gloo have started their threads, which may run on any core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def serve(path: str, rank: int, orders: object) -> None:
    """Executes the orders that a rank receives, as methods of `orders`, until the connection ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rwb")
        answer: Any = {"rank": rank}
        while True:
            stream.write((json.dumps(answer) + "\n").encode())
            stream.flush()
            line = stream.readline()
            if not line:
                return
            received = json.loads(line)
            answer = getattr(orders, received["order"])(**received["arguments"])


def serve_alone(orders: object) -> None:
    """Runs a rank of sirtaki for torch until its job ends: one thread, and no garbage collection."""
    import torch

    import sirtaki.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    gc.disable()
    serve(sys.argv[1], hvd.rank(), orders)
    hvd.shutdown()


def join_group(backend: str, folder: Path, rank: int, size: int) -> None:
    """Makes the ranks a group of torch.distributed, which meets through a file in their common folder."""
    import torch.distributed as dist

    dist.init_process_group(backend, f"file://{folder / backend}", rank=rank, world_size=size)


@contextmanager
def training_ranks(backend: str, path: str) -> Iterator[None]:
    """Runs a rank of both sirtaki, which it has joined, and torch.distributed, without garbage collection."""
    import torch.distributed as dist

    import sirtaki.torch as hvd

    join_group(backend, Path(path).parent, hvd.rank(), hvd.size())
    gc.disable()
    yield
    dist.destroy_process_group()
    hvd.shutdown()
