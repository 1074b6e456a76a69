"""Implementations of collective operations: those of `sirtaki bench`, and more operations and layers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from common.memory_bound import MemoryBound
from sirtaki.bench.implementations import Bound, Implementation, implement
from sirtaki.bench.patterns import Patterns
from sirtaki.bindings import request as core
from sirtaki.bindings import shared_memory
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import Batch
from sirtaki.common.ops.requests import NO_REDUCTION, Sum, describe, group_calls, reduction
from sirtaki.common.ops.requests import Call as Named
from sirtaki.common.ops.tensor import DTYPE_CODES, ROW_MAJOR, TensorView
from sirtaki.runner.bench.operations import OPERATIONS as PRODUCT
from sirtaki.runner.bench.operations import BenchOperation

Array = NDArray[Any]
GROUP_SIZE = 32  # tensors of a grouped all-reduce
GROUPED = replace(PRODUCT["allreduce"], name="grouped_allreduce")
SENDRECV = BenchOperation("sendrecv", "", "", lambda _: 1.0)  # to the next rank, from the one before
OPERATIONS = {**PRODUCT, GROUPED.name: GROUPED, SENDRECV.name: SENDRECV}


def bind(
    name: str, peer: Implementation, size: int, rank: int, ranks: int, dtype: str = "float32"
) -> Bound | None:
    """Returns a peer's operation on `size` bytes of zeros; None if the peer lacks the operation.

    Checks its result on the ranks' patterns, and ends the process if that is wrong.
    """
    operation = OPERATIONS[name]
    if operation is SENDRECV:
        operation = replace(operation, root=(rank - 1) % ranks)  # whose array the rank receives
    count = operation.count(size, np.dtype(dtype).itemsize, ranks)
    given, output = (
        np.empty(amount(count, ranks), dtype) for amount in (operation.input_count, operation.output_count)
    )
    try:
        bound = peer.bind(OPERATIONS[name], given, output)
    except NotImplementedError:
        return None
    patterns = Patterns(operation, dtype, ranks)
    bound.fill(patterns.input(count, rank))
    bound.call()
    result: Array | None = bound.result()  # None: nothing to check
    if operation.has_size and result is not None and patterns.count_wrong(result, count, rank):
        raise SystemExit(f"rank {rank}: the result of {name} on {count} elements is wrong")
    bound.fill(0)  # zeros stay zeros, however often they are summed in place
    return bound


@dataclass(frozen=True)
class Extended:
    """An implementation of `sirtaki bench` for arrays in memory, with the operations that it lacks."""

    implementation: Implementation
    convert: Callable[[Array], Any]
    send_receive: Callable[[Any, Any], object]
    reduce_group: Callable[[Sequence[Any]], object]
    lacks: Sequence[str] = ()  # dtypes

    @property
    def version(self) -> str:
        return self.implementation.version

    def bind(self, operation: BenchOperation, array: Array, output: Array) -> Bound:
        if array.dtype.name in self.lacks:
            raise NotImplementedError
        fill = partial(np.copyto, array)
        if operation is SENDRECV:
            call = partial(self.send_receive, self.convert(array), self.convert(output))
            return Bound(call, fill, lambda: output)
        if operation is GROUPED:
            parts = [self.convert(part) for part in np.array_split(array, GROUP_SIZE)]
            return Bound(partial(self.reduce_group, parts), fill, lambda: array)
        return self.implementation.bind(operation, array, output)


def sirtaki_of(framework: str, rank: int, ranks: int) -> Extended:
    """Returns sirtaki.numpy or sirtaki.torch, with arrays in memory."""
    hvd = importlib.import_module(f"sirtaki.{framework}")
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    if framework == "torch":
        from sirtaki.bench.torch_implementations import TorchSirtaki
        from sirtaki.bench.torch_implementations import tensor_of as convert

        implementation: Implementation = TorchSirtaki("cpu")
    else:
        implementation, convert = implement("sirtaki", "cpu"), np.asarray

    def send_receive(sent: Any, received: Any) -> None:
        sending = hvd.send_async(sent, following, name=f"{framework} from {rank}")
        hvd.recv(received, previous, name=f"{framework} from {previous}")
        hvd.synchronize(sending)

    def reduce_group(parts: Sequence[Any]) -> None:
        hvd.grouped_allreduce_(parts, op=hvd.Sum, name=framework)

    return Extended(implementation, convert, send_receive, reduce_group)


def gloo(rank: int, ranks: int) -> Extended:
    """Returns gloo, by torch.distributed. Its ranks are those of sirtaki."""
    import torch.distributed as dist

    from sirtaki.bench.torch_implementations import tensor_of

    def send_receive(sent: Any, received: Any) -> None:
        sending: Any = dist.isend(sent, (rank + 1) % ranks)
        dist.recv(received, (rank - 1) % ranks)
        sending.wait()

    return Extended(implement("gloo", "cpu"), tensor_of, send_receive, dist.all_reduce_coalesced)


def open_mpi() -> tuple[Extended, int, int]:
    """Returns mpi4py over the installed MPI, of which this process becomes a rank; the rank, and how many.

    A group is reduced tensor by tensor: MPI has no groups.
    """
    from mpi4py import MPI as mpi

    world: Any = mpi.COMM_WORLD
    rank, ranks = world.Get_rank(), world.Get_size()

    def send_receive(sent: Array, received: Array) -> None:
        world.Sendrecv(sent, (rank + 1) % ranks, 0, received, (rank - 1) % ranks)

    def reduce_group(parts: Sequence[Array]) -> None:
        for part in parts:
            world.Allreduce(mpi.IN_PLACE, part, op=mpi.SUM)

    lacks = ("float16", "bfloat16")
    return Extended(implement("mpi", "cpu"), np.asarray, send_receive, reduce_group, lacks), rank, ranks


class Core:
    """The core's C functions on requests that are described once, without an adapter in between.

    With `shared`, it offers all-reduces only, of tensors in memory that the ranks of a host share.
    """

    version = "C functions through cffi"
    KINDS: ClassVar = {
        "allreduce": core.ALLREDUCE,
        "broadcast": core.BROADCAST,
        "allgather": core.ALLGATHER,
        "reducescatter": core.REDUCESCATTER,
        "alltoall": core.ALLTOALL,
    }

    def __init__(self, context: Context, shared: bool = False) -> None:
        self._context, self._shared = context, shared
        self._sum = reduction(Sum, None)

    def bind(self, operation: BenchOperation, array: Array, output: Array) -> Bound:
        kind = self.KINDS.get(operation.name)
        if self._shared:
            if operation.name != "allreduce":
                raise NotImplementedError
            try:
                array = np.frombuffer(shared_memory.allocate(self._context, array.nbytes), array.dtype)
            except UnsupportedError as error:  # the ranks share no memory
                raise NotImplementedError from error
        result: Array | None = array if operation.is_in_place else output
        if operation is GROUPED:
            batch = self._group(array)
        elif operation is SENDRECV:
            batch = self._exchange(array, output)
        elif kind is None:
            raise NotImplementedError
        else:
            batch, own, how = Batch(1), _view(array), self._sum if operation.reduces else NO_REDUCTION
            if operation.parts_out:
                result = None  # the core allocates it
            target = 0 if result is None else result.ctypes.data
            describe(batch, kind, own, target, Named(f"core.{operation.name}"), how=how)
        context = self._context

        def call() -> None:
            context.run(batch)
            context.release(batch)

        return Bound(call, partial(np.copyto, array), lambda: result)  # type: ignore[arg-type,return-value]

    def _group(self, array: Array) -> Batch:
        batch = Batch(GROUP_SIZE)
        calls = group_calls("allreduce", "core", 0, GROUP_SIZE)
        for index, (part, call) in enumerate(zip(np.array_split(array, GROUP_SIZE), calls, strict=True)):
            describe(batch, core.ALLREDUCE, _view(part), part.ctypes.data, call, index, how=self._sum)
        return batch

    def _exchange(self, array: Array, output: Array) -> Batch:
        batch, rank, ranks = Batch(2), self._context.rank, self._context.size
        ends = ((array, rank, (rank + 1) % ranks), (output, (rank - 1) % ranks, rank))
        for index, (given, source, target) in enumerate(ends):
            where = {"root": source, "destination": target}
            describe(batch, core.SEND, _view(given), given.ctypes.data, Named("core.send"), index, **where)
        return batch


def _view(array: Array) -> TensorView:
    return TensorView(array.ctypes.data, array.shape, DTYPE_CODES[array.dtype.name], ROW_MAJOR, array)


class DeepSpeed:
    """DeepSpeed's all-reduce for CPUs, an operation of torch that DeepSpeed compiles at its first use.

    It sums tensors of less than 2 GiB among ranks of one host, which wait for each other without a pause.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        import deepspeed
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        import sirtaki.numpy as hvd

        try:
            native = ShareMemCommBuilder().load()
        except RuntimeError as error:  # without a compiler or ninja
            raise ImportError(str(error).partition("\n")[0]) from error
        self.version = f"deepspeed {deepspeed.__version__}"
        self._level = native.vector_kernel_level()
        job = f"sirtaki-benchmark-{hvd.broadcast_object(os.getpid(), root_rank=0)}"
        own = {"LOCAL_SIZE": str(ranks), "MASTER_ADDR": job, "MASTER_PORT": "0"}
        with mock.patch.dict(os.environ, own):
            native.initialize(ranks, rank)
        hvd.barrier()
        for segment in Path("/dev/shm").glob(f"*_{job}_0_{rank}"):  # which DeepSpeed does not remove
            segment.unlink()

    def bind(self, operation: BenchOperation, array: Array, output: Array) -> Bound:
        least = 1 if array.dtype == np.float32 else 2  # DeepSpeed's rule: AVX2, or AVX-512
        if operation.name != "allreduce" or self._level < least:
            raise NotImplementedError
        import torch

        from sirtaki.bench.torch_implementations import tensor_of

        call = partial(torch.ops.deepspeed.inference_all_reduce_, tensor_of(array))
        return Bound(call, partial(np.copyto, array), lambda: array)


class Prototype:
    """The memory-bound prototype. It adds float32; as many bytes of other dtypes take it the same time."""

    version = "memory-bound prototype"

    def __init__(self, bound: MemoryBound) -> None:
        self._bound = bound

    def bind(self, operation: BenchOperation, array: Array, output: Array) -> Bound:
        if operation.name != "allreduce":
            raise NotImplementedError
        call = self._bound.bind([array.ctypes.data], [array.nbytes // 4])
        result: Array | None = array if array.dtype == np.float32 else None
        return Bound(call, partial(np.copyto, array), lambda: result)  # type: ignore[arg-type,return-value]
