"""Implementations on tensors of torch, on the CPU or a GPU: sirtaki.torch and torch.distributed."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import sirtaki.numpy as hvd
import sirtaki.torch as hvd_torch
from sirtaki.bench.implementations import Bound, bind_own
from sirtaki.bench.patterns import Array
from sirtaki.bindings._version import VERSION
from sirtaki.common import basics
from sirtaki.runner.bench.operations import BenchOperation

# torch 2.13 introduces new names; the old ones work in all versions that sirtaki supports.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


class TorchSirtaki:
    """sirtaki.torch; results are new tensors unless the operation works in place."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.version = f"{VERSION}, torch {torch.__version__}"

    def bind(self, operation: BenchOperation, array: Array, output: Array) -> Bound:
        given = tensor_of(array).to(self._device)
        call, result = bind_own(hvd_torch, operation, given)
        return _bound(call, array, given, result)


class TorchDistributed:
    """A backend of torch.distributed."""

    def __init__(self, backend: str, device: str) -> None:
        self._device = device
        self.version = f"torch {torch.__version__}"
        if backend == "nccl":
            self.version += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        # `hvdrun --torch-env` sets the variables; under mpirun all ranks are on one host, and meet at a file.
        at = None if "MASTER_ADDR" in os.environ else f"file://{self._common_folder()}/{backend}"
        dist.init_process_group(backend, at, rank=basics.rank(), world_size=basics.size())

    def _common_folder(self) -> str:
        """Returns a folder created by rank 0, removed when rank 0 ends, and accessible to its user only."""
        self._folder = tempfile.TemporaryDirectory(prefix="sirtaki-bench-") if basics.rank() == 0 else None
        return str(hvd.broadcast_object(self._folder and self._folder.name, root_rank=0))

    def bind(self, operation: BenchOperation, array: Array, output: Array) -> Bound:
        function = getattr(dist, operation.torch)
        given = tensor_of(array).to(self._device)
        if not operation.has_size:
            return _bound(function, array, given, lambda: given)
        if operation.is_in_place:
            extra = () if operation.reduces else (operation.root,)
            return _bound(lambda: function(given, *extra), array, given, lambda: given)
        into = tensor_of(output).to(self._device)
        return _bound(lambda: function(into, given), array, given, lambda: into)


def tensor_of(array: Array) -> Tensor:
    """Returns a tensor in the array's memory, by bytes: numpy's bfloat16 is unknown to torch."""
    return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name))


def _bound(call: Callable[[], object], array: Array, given: Tensor, result: Callable[[], Tensor]) -> Bound:
    """Returns an operation on the array's tensor; its call returns when the GPU has the result."""

    def fill(values: Array | int) -> None:
        np.copyto(array, values)
        given.copy_(tensor_of(array))

    def call_and_wait() -> None:
        call()
        torch.cuda.synchronize(given.device)

    def get() -> Array:
        return result().cpu().view(torch.uint8).numpy().view(array.dtype)

    return Bound(call_and_wait if given.is_cuda else call, fill, get)
