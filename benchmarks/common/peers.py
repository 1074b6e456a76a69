"""Implementations of collective operations: sirtaki by layer, and its peers."""

from __future__ import annotations

import importlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.collectives import GROUP_SIZE, Array, Call
from common.serving import join_group


class Peer:
    """One implementation. A subclass has a method for each collective that it offers."""

    version = ""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.next, self.previous = (rank + 1) % size, (rank - 1) % size

    def bind(self, collective: str, array: Array) -> Call | None:
        """Returns the call to measure, on this rank's input; None if the peer lacks this operation."""
        make = getattr(self, collective, None)
        return None if make is None else make(array)


class Sirtaki(Peer):
    """sirtaki.numpy or sirtaki.torch, whose tensors lie on the given device."""

    def __init__(self, framework: str, rank: int, size: int, device: str = "cpu") -> None:
        super().__init__(rank, size)
        library = importlib.import_module(framework)
        self._hvd: Any = importlib.import_module(f"sirtaki.{framework}")
        self._convert = library.asarray if framework == "numpy" else partial(_on_device, device)
        self._name = framework
        sirtaki = importlib.import_module("sirtaki")
        self.version = f"sirtaki {sirtaki.__version__}, {framework} {library.__version__}"

    def allreduce(self, array: Array) -> Call:
        hvd, tensor, name = self._hvd, self._convert(array), self._name
        return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=name)

    def grouped_allreduce(self, array: Array) -> Call:
        hvd, name = self._hvd, self._name
        tensors = [self._convert(part) for part in np.array_split(array, GROUP_SIZE)]
        return lambda: hvd.grouped_allreduce_(tensors, op=hvd.Sum, name=name)

    def broadcast(self, array: Array) -> Call:
        hvd, tensor, name = self._hvd, self._convert(array), self._name
        return lambda: hvd.broadcast_(tensor, root_rank=0, name=name)

    def allgather(self, array: Array) -> Call:
        hvd, tensor, name = self._hvd, self._convert(array), self._name
        return lambda: hvd.allgather(tensor, name=name)

    def reducescatter(self, array: Array) -> Call:
        hvd, tensor, name = self._hvd, self._convert(array), self._name
        return lambda: hvd.reducescatter(tensor, op=hvd.Sum, name=name)

    def alltoall(self, array: Array) -> Call:
        hvd, tensor, name = self._hvd, self._convert(array), self._name
        return lambda: hvd.alltoall(tensor, name=name)

    def sendrecv(self, array: Array) -> Call:
        hvd, tensor, received = self._hvd, self._convert(array), self._convert(np.empty_like(array))
        to_next, to_this = (f"{self._name} from {rank}" for rank in (self.rank, self.previous))

        def call() -> Any:
            sending = hvd.send_async(tensor, self.next, name=to_next)
            hvd.recv(received, self.previous, name=to_this)
            hvd.synchronize(sending)
            return received

        return call

    def barrier(self, _: Array) -> Call:
        return self._hvd.barrier


class TorchDistributed(Peer):
    """torch.distributed over one of its backends. The ranks meet through a file in their common folder."""

    def __init__(self, backend: str, rank: int, size: int, folder: Path, device: str = "cpu") -> None:
        super().__init__(rank, size)
        import torch
        import torch.distributed as dist

        # torch 2.13 introduces new names; the old ones work in all versions that sirtaki supports.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        self._dist, self._torch = dist, torch
        self._convert = partial(_on_device, device)
        join_group(backend, folder, rank, size)
        self.version = f"torch {torch.__version__}"

    def allreduce(self, array: Array) -> Call:
        dist, tensor = self._dist, self._convert(array)
        return lambda: _last(dist.all_reduce(tensor), tensor)

    def grouped_allreduce(self, array: Array) -> Call:
        dist = self._dist
        tensors = list(self._convert(array).tensor_split(GROUP_SIZE))
        return lambda: _last(dist.all_reduce_coalesced(tensors), tensors)

    def broadcast(self, array: Array) -> Call:
        dist, tensor = self._dist, self._convert(array)
        return lambda: _last(dist.broadcast(tensor, 0), tensor)

    def allgather(self, array: Array) -> Call:
        dist, tensor = self._dist, self._convert(array)
        gathered = tensor.new_empty(tensor.numel() * self.size)
        return lambda: _last(dist.all_gather_into_tensor(gathered, tensor), gathered)

    def reducescatter(self, array: Array) -> Call:
        dist, tensor = self._dist, self._convert(array)
        part = tensor.new_empty(tensor.numel() // self.size)
        return lambda: _last(dist.reduce_scatter_tensor(part, tensor), part)

    def alltoall(self, array: Array) -> Call:
        dist, tensor = self._dist, self._convert(array)
        received = self._torch.empty_like(tensor)
        return lambda: _last(dist.all_to_all_single(received, tensor), received)

    def sendrecv(self, array: Array) -> Call:
        dist, tensor = self._dist, self._convert(array)
        received = self._torch.empty_like(tensor)

        def call() -> Any:
            sending: Any = dist.isend(tensor, self.next)
            dist.recv(received, self.previous)
            sending.wait()
            return received

        return call

    def barrier(self, _: Array) -> Call:
        return self._dist.barrier


class OpenMPI(Peer):
    """mpi4py over the installed MPI. It makes the process a rank of MPI."""

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD
        super().__init__(self._world.Get_rank(), self._world.Get_size())
        library = MPI.Get_library_version().split(",")[0].strip()
        self.version = f"{library}, mpi4py {mpi4py.__version__}"

    def allreduce(self, array: Array) -> Call:
        mpi, world = self._mpi, self._world
        return lambda: _last(world.Allreduce(mpi.IN_PLACE, array, op=mpi.SUM), array)

    def grouped_allreduce(self, array: Array) -> Call:
        """Reduces the tensors one after the other: MPI has no groups."""
        mpi, world, parts = self._mpi, self._world, np.array_split(array, GROUP_SIZE)

        def call() -> list[Array]:
            for part in parts:
                world.Allreduce(mpi.IN_PLACE, part, op=mpi.SUM)
            return parts

        return call

    def broadcast(self, array: Array) -> Call:
        world = self._world
        return lambda: _last(world.Bcast(array, root=0), array)

    def allgather(self, array: Array) -> Call:
        world, gathered = self._world, np.empty(array.size * self.size, np.float32)
        return lambda: _last(world.Allgather(array, gathered), gathered)

    def reducescatter(self, array: Array) -> Call:
        mpi, world, part = self._mpi, self._world, np.empty(array.size // self.size, np.float32)
        return lambda: _last(world.Reduce_scatter_block(array, part, op=mpi.SUM), part)

    def alltoall(self, array: Array) -> Call:
        world, received = self._world, np.empty_like(array)
        return lambda: _last(world.Alltoall(array, received), received)

    def sendrecv(self, array: Array) -> Call:
        world, received = self._world, np.empty_like(array)
        return lambda: _last(world.Sendrecv(array, self.next, 0, received, self.previous), received)

    def barrier(self, _: Array) -> Call:
        return self._world.Barrier


def _on_device(device: str, array: Array) -> Any:
    import torch

    return torch.from_numpy(array).to(device)


def _last(_: Any, result: Any) -> Any:
    """Returns the second of two arguments: the array that a call has written to."""
    return result
