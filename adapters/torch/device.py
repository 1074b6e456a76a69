"""The device-dependent code. Nothing else in this package depends on CUDA.

GPUs are identified by their numbers, as torch counts them, and CUDA streams by their addresses.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import DeviceOutput
from sirtaki.torch import _private
from sirtaki.torch.ops.nested import tensors_in

if TYPE_CHECKING:
    from sirtaki.bindings.topology import Topology


def ordinal(tensor: Tensor) -> int:
    """Returns the number of a tensor's GPU; -1: it is in CPU memory."""
    return tensor.get_device()


def current_stream(gpu: int) -> int:
    """Returns the CUDA stream in which this thread queues work for a GPU."""
    return _private.current_raw_stream(gpu)


def exposed(context: Context, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Returns a context that measures a wait for these tensors as exposed; a null context on a GPU."""
    is_on_gpu = any(ordinal(tensor) >= 0 for tensor in tensors)
    return nullcontext() if is_on_gpu else context.steps.exposed


def refuse_capture() -> None:
    """Raises UnsupportedError if the current stream is being captured in a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "operations between ranks cannot be part of a CUDA graph: call them outside of torch.cuda.graph()"
        )


def record_stream(gpu: int, tensors: Any) -> None:
    """Records that the current stream uses tensors of another stream, given as nested tuples and lists.

    Otherwise torch reuses a tensor's memory when the stream that made it is done with it.
    """
    stream = torch.cuda.current_stream(gpu)
    for tensor in tensors_in(tensors):
        if ordinal(tensor) == gpu:
            tensor.record_stream(stream)


def new_stream(gpu: int) -> AbstractContextManager[Any]:
    """Returns a context manager that enters a new stream, separate from the program's streams."""
    return torch.cuda.stream(torch.cuda.Stream(gpu))


def record_event(gpu: int) -> Any:
    """Returns an event at which the work ends that is in the current stream now."""
    return torch.cuda.current_stream(gpu).record_event()


def wait_event(gpu: int, event: Any) -> None:
    """Makes the current stream wait for an event of another stream."""
    torch.cuda.current_stream(gpu).wait_event(event)


def new_future(gpu: int) -> Any:
    """Returns a future: a waiter's stream waits for the stream in which the value was set."""
    return torch.futures.Future(devices=[torch.device("cuda", gpu)])


def this_stream(gpu: int) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a factory of context managers that enter the stream current at this call, in any thread."""
    if gpu < 0:
        return nullcontext
    stream = torch.cuda.current_stream(gpu)
    return lambda: torch.cuda.stream(stream)


def copy_of(output: DeviceOutput, gpu: int) -> Tensor:
    """Copies a result that the core allocated on a GPU into torch's own memory, as bytes.

    The copy is made in the current stream; the core keeps the result's memory until it is done.
    """
    place = torch.device("cuda", gpu)
    if not output.bytes:
        return torch.empty(0, dtype=torch.uint8, device=place)
    return torch.as_tensor(_DeviceBytes(output), device=place).clone()


class _DeviceBytes:
    """Bytes on a GPU, in CUDA's array interface (version 3, by Numba)."""

    def __init__(self, output: DeviceOutput) -> None:
        self.__cuda_array_interface__ = {
            "shape": (output.bytes,),
            "typestr": "|u1",
            "data": (output.address, False),
            "version": 3,
        }


def warn_if_crowded(topology: Topology) -> None:
    """Reports, on rank 0, if ranks have to share GPUs; not if the GPUs that a rank may use are restricted."""
    if topology.rank or "CUDA_VISIBLE_DEVICES" in os.environ:
        return
    gpus, ranks = torch.cuda.device_count(), max(Counter(peer.host_index for peer in topology.peers).values())
    if ranks > gpus:
        warnings.warn(
            f"{ranks} ranks of this job run on one host, which has {gpus} GPU(s): ranks that share one wait "
            "for each other there, and exchange tensors through the CPU. Start one rank for each GPU "
            "(hvdrun -np), and call torch.cuda.set_device(hvd.local_rank()) in each",
            stacklevel=3,
        )
