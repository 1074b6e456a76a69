"""Process groups for the cases of the backend `sirtaki`, and gloo's to compare with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import sirtaki.torch as hvd
import sirtaki.torch.backend

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (70_001,)]

# The destructor of gloo's groups holds the interpreter's lock while it waits for a thread that may need it.
_never_destroyed: list[Any] = []


def gloo_group() -> Any:
    """Returns a group of all ranks over gloo, to compare with."""
    _never_destroyed.append(dist.new_group(backend="gloo"))
    return _never_destroyed[-1]


@contextmanager
def default_group(backend: str = "sirtaki", seconds: float = 300.0) -> Iterator[None]:
    """Makes all ranks the default group."""
    assert sirtaki.torch.backend is not None  # registered by its import
    is_first = hvd.rank() == 0
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_first else None
    port = hvd.broadcast_object(server.port if server else None, 0)
    store = server or dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        backend, store=store, rank=hvd.rank(), world_size=hvd.size(), timeout=timedelta(seconds=seconds)
    )
    if backend == "gloo":
        _never_destroyed.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
    hvd.barrier()  # the server of the store outlives the other ranks' groups


def in_group(body: Callable[..., None]) -> Callable[..., None]:
    """Runs a case's body with sirtaki's default group."""

    @functools.wraps(body)
    def run(*arguments: object, **named: object) -> None:
        with default_group():
            body(*arguments, **named)

    return run


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns small integers: every dtype holds them, their sums and their products over 4 ranks exactly."""
    numbers = torch.arange(int(torch.Size(shape).numel())) * 5 + rank * 7
    return (numbers % 3 + rank % 2).reshape(shape).to(dtype)


def everyone(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns the values of all ranks."""
    return torch.stack([values(rank, shape, dtype) for rank in range(dist.get_world_size())])


def same(actual: Tensor, expected: Tensor) -> None:
    """Asserts that two tensors are equal, with dtype and shape."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert torch.equal(actual, expected), (actual, expected)
