"""Whoever can sum a float32 array in place over all ranks: sirtaki by layer, and its peers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Call = Callable[[], object]


class Peer(Protocol):
    """One implementation. `bind` makes the call that is measured."""

    version: str

    def bind(self, array: Array) -> Call: ...


class SirtakiNumpy:
    """sirtaki.numpy."""

    def __init__(self) -> None:
        import sirtaki
        import sirtaki.numpy as hvd

        self._hvd = hvd
        self.version = f"sirtaki {sirtaki.__version__}, numpy {np.__version__}"

    def bind(self, array: Array) -> Call:
        hvd = self._hvd
        return lambda: hvd.allreduce_(array, op=hvd.Sum, name="numpy")


class SirtakiTorch:
    """sirtaki.torch."""

    def __init__(self) -> None:
        import torch

        import sirtaki
        import sirtaki.torch as hvd

        self._hvd, self._torch = hvd, torch
        self.version = f"sirtaki {sirtaki.__version__}, torch {torch.__version__}"

    def bind(self, array: Array) -> Call:
        hvd, tensor = self._hvd, self._torch.from_numpy(array)
        return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="torch")


class Gloo:
    """torch.distributed over gloo."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        import torch
        import torch.distributed as dist

        self._dist, self._torch = dist, torch
        store = f"file://{os.path.join(folder, 'gloo')}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        self.version = f"torch {torch.__version__}"

    def bind(self, array: Array) -> Call:
        dist, tensor = self._dist, self._torch.from_numpy(array)
        return lambda: dist.all_reduce(tensor)


class OpenMPI:
    """mpi4py over whatever MPI is there. It makes the process a rank of MPI."""

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI

        self._mpi: Any = MPI
        library = MPI.Get_library_version().split(",")[0].strip()
        self.version = f"{library}, mpi4py {mpi4py.__version__}"
        self.rank, self.size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()

    def bind(self, array: Array) -> Call:
        mpi = self._mpi
        return lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array, op=mpi.SUM)


def check(bound: Callable[[Array], Call], rank: int, size: int, count: int) -> None:
    """Checks one sum of `count` elements, untimed. All ranks must call it."""
    pattern = np.arange(count, dtype=np.float32) % 97
    array = pattern * (rank + 1)
    bound(array)()
    if not np.array_equal(array, pattern * (size * (size + 1) / 2)):
        sys.exit(f"rank {rank}: the sum of {count} elements is wrong")
