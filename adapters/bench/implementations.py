"""Implementations of the measured operations on arrays of numpy: sirtaki, MPI, and a plain copy of memory.

Those on tensors of torch are in torch_implementations.py, so that the others do not need torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import sirtaki.numpy as hvd
from sirtaki.bench.patterns import Array
from sirtaki.bindings._version import VERSION
from sirtaki.common import basics
from sirtaki.runner.bench.messages import COPY, OWN
from sirtaki.runner.bench.operations import BenchOperation
from sirtaki.runner.bench.peers import CPU, MPI

Call = Callable[[], Any]


@dataclass(frozen=True)
class Bound:
    """An operation on its tensors: the call to measure, and functions that fill its input with an array or a
    number, and that return the result.

    An operation in place overwrites the input.
    """

    call: Call
    fill: Callable[[Array | int], None]
    result: Callable[[], Array]


def _bound(call: Call, array: Array, result: Callable[[], Array]) -> Bound:
    """Returns an operation on the array."""
    return Bound(call, lambda values: np.copyto(array, values), result)


def bind_own(module: Any, operation: BenchOperation, given: Any) -> tuple[Call, Callable[[], Any]]:
    """Returns a call of sirtaki's operation, by the module for the library of `given`, and its result."""
    if not operation.has_size:
        return module.barrier, lambda: given
    function = getattr(module, f"{operation.name}_" if operation.is_in_place else operation.name)
    options: dict[str, Any] = {"name": f"bench {operation.name}"}
    if operation.reduces:
        options["op"] = module.Sum
    if operation.root >= 0:
        options["root_rank"] = operation.root
    last = [given]

    def call() -> None:
        last[0] = function(given, **options)

    return call, lambda: last[0]


class Implementation(Protocol):
    """One library that offers the operations. All ranks have to create it, and make the same calls."""

    version: str

    def bind(self, operation: BenchOperation, array: Array, output: Array) -> Bound:
        """Returns the operation on the input `array`; it may write its result to `output`."""


class Sirtaki:
    """sirtaki.numpy; results are new arrays unless the operation works in place."""

    version = VERSION

    def bind(self, operation: BenchOperation, array: Array, output: Array) -> Bound:
        call, result = bind_own(hvd, operation, array)
        return _bound(call, array, result)


class Mpi:
    """mpi4py over the MPI that has started the processes."""

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI as mpi

        self._mpi: Any = mpi
        self._world: Any = mpi.COMM_WORLD
        library = mpi.Get_library_version().split(",")[0].strip()
        self.version = f"{library}, mpi4py {mpi4py.__version__}"

    def bind(self, operation: BenchOperation, array: Array, output: Array) -> Bound:
        function = getattr(self._world, operation.mpi)
        if not operation.has_size:
            return _bound(function, array, lambda: array)
        options = {"op": self._mpi.SUM} if operation.reduces else {}
        if operation.root >= 0:
            return _bound(lambda: function(array, root=operation.root), array, lambda: array)
        if operation.is_in_place:
            return _bound(lambda: function(self._mpi.IN_PLACE, array, **options), array, lambda: array)
        return _bound(lambda: function(array, output, **options), array, lambda: output)


class Copy:
    """A copy of memory: the limit of operations among ranks of a host."""

    version = f"numpy {np.__version__}"

    def bind(self, operation: BenchOperation, array: Array, output: Array) -> Bound:
        larger = max(array.size, output.size)
        # Pages of np.zeros would all be the same page of memory, and in the cache.
        source = np.ones(max(round(larger * operation.copied(basics.size())), 1), array.dtype)
        target = np.ones_like(source)
        return _bound(lambda: np.copyto(target, source), array, lambda: array)


def _torch(name: str, device: str) -> Implementation:
    from sirtaki.bench.torch_implementations import TorchDistributed, TorchSirtaki

    return TorchSirtaki(device) if name == OWN else TorchDistributed(name, device)


def implement(name: str, device: str) -> Implementation:
    """Returns an implementation for tensors on "cpu", or on a GPU such as "cuda:0". All ranks have to call
    it.
    """
    is_numpys = name in _NUMPYS and device == CPU
    return _NUMPYS[name]() if is_numpys else _torch(name, device)


_NUMPYS: dict[str, Callable[[], Implementation]] = {OWN: Sirtaki, COPY: Copy, MPI: Mpi}
