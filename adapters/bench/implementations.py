"""Implementations of the measured operations: sirtaki, its peers, and a plain copy of memory."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import sirtaki.numpy as hvd
from sirtaki.bench.patterns import Array
from sirtaki.bindings._version import VERSION
from sirtaki.common import basics
from sirtaki.runner.bench.messages import COPY, OWN
from sirtaki.runner.bench.operations import Operation
from sirtaki.runner.bench.peers import GLOO, MPI

Call = Callable[[], Any]


@dataclass(frozen=True)
class Bound:
    """An operation on its tensors: the call to measure, its input, and a function that returns the result.

    An operation in place overwrites the input.
    """

    call: Call
    input: Array
    result: Callable[[], Array]


class Implementation(Protocol):
    """One library that offers the operations. All ranks have to create it, and make the same calls."""

    version: str

    def bind(self, operation: Operation, array: Array, output: Array) -> Bound:
        """Returns the operation on the input `array`, whose result may be written to `output`."""


class Sirtaki:
    """sirtaki.numpy, whose results are new arrays unless the operation works in place."""

    version = VERSION

    def bind(self, operation: Operation, array: Array, output: Array) -> Bound:
        if not operation.has_size:
            return Bound(hvd.barrier, array, lambda: array)
        function = getattr(hvd, f"{operation.name}_" if operation.is_in_place else operation.name)
        options: dict[str, Any] = {"name": f"bench {operation.name}"}
        if operation.reduces:
            options["op"] = hvd.Sum
        if operation.root >= 0:
            options["root_rank"] = operation.root
        last = [array]

        def call() -> None:
            last[0] = function(array, **options)

        return Bound(call, array, lambda: last[0])


class Gloo:
    """torch.distributed over gloo."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        # torch 2.13 introduces new names; the old ones work in all versions that sirtaki supports.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        self._dist: Any = dist
        self._from_numpy = torch.from_numpy
        self.version = f"torch {torch.__version__}"
        # `hvdrun --torch-env` sets the variables; under mpirun all ranks are on one host, and meet at a file.
        at = None if "MASTER_ADDR" in os.environ else f"file://{self._common_folder()}/gloo"
        dist.init_process_group("gloo", at, rank=basics.rank(), world_size=basics.size())

    def _common_folder(self) -> str:
        """Returns a folder of rank 0, which it removes when it ends, and which only its user enters."""
        self._folder = tempfile.TemporaryDirectory(prefix="sirtaki-bench-") if basics.rank() == 0 else None
        return str(hvd.broadcast_object(self._folder and self._folder.name, root_rank=0))

    def bind(self, operation: Operation, array: Array, output: Array) -> Bound:
        function = getattr(self._dist, operation.torch)
        if not operation.has_size:
            return Bound(function, array, lambda: array)
        given = self._from_numpy(array)
        if operation.is_in_place:
            extra = () if operation.reduces else (operation.root,)
            return Bound(lambda: function(given, *extra), array, lambda: array)
        into = self._from_numpy(output)
        return Bound(lambda: function(into, given), array, lambda: output)


class Mpi:
    """mpi4py over the MPI that has started the processes."""

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI as mpi

        self._mpi: Any = mpi
        self._world: Any = mpi.COMM_WORLD
        library = mpi.Get_library_version().split(",")[0].strip()
        self.version = f"{library}, mpi4py {mpi4py.__version__}"

    def bind(self, operation: Operation, array: Array, output: Array) -> Bound:
        function = getattr(self._world, operation.mpi)
        if not operation.has_size:
            return Bound(function, array, lambda: array)
        options = {"op": self._mpi.SUM} if operation.reduces else {}
        if operation.root >= 0:
            return Bound(lambda: function(array, root=operation.root), array, lambda: array)
        if operation.is_in_place:
            return Bound(lambda: function(self._mpi.IN_PLACE, array, **options), array, lambda: array)
        return Bound(lambda: function(array, output, **options), array, lambda: output)


class Copy:
    """A copy of memory: the limit of operations among ranks of one host."""

    version = f"numpy {np.__version__}"

    def bind(self, operation: Operation, array: Array, output: Array) -> Bound:
        larger = max(array.size, output.size)
        # Pages of np.zeros would all be the same page of memory, and in the cache.
        source = np.ones(max(round(larger * operation.copied(basics.size())), 1), array.dtype)
        target = np.ones_like(source)
        return Bound(lambda: np.copyto(target, source), array, lambda: array)


IMPLEMENTATIONS: dict[str, Callable[[], Implementation]] = {OWN: Sirtaki, COPY: Copy, GLOO: Gloo, MPI: Mpi}
