"""The backend's broadcasts, gathers, scatters, all-to-alls and barriers, with exact results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sirtaki.torch as hvd
from cases import case
from cases.torch_backend_groups import FLOATS, INTEGERS, SHAPES, in_group, rank, same, size, values
from sirtaki.common.exceptions import MismatchError

DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)


def of_all(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [values(other, shape, dtype) for other in range(size())]


@case()
@in_group
def broadcast() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            for root in range(size()):
                tensor = values(rank(), shape, dtype)
                dist.broadcast(tensor, root)
                same(tensor, values(root, shape, dtype))
    base = torch.zeros(4, 6)
    dist.broadcast(base[:, ::2], 0)
    parameter = torch.nn.Parameter(torch.full((3,), float(rank() + 1)))
    dist.broadcast(parameter.data, 0)
    same(parameter.detach(), torch.ones(3))


@case()
@in_group
def all_gather() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            mine, expected = values(rank(), shape, dtype), of_all(shape, dtype)
            outputs = [torch.zeros_like(mine) for _ in range(size())]
            dist.all_gather(outputs, mine)
            for output, one in zip(outputs, expected, strict=True):
                same(output, one)
            if shape and not dtype.is_complex:
                whole = torch.zeros((size() * shape[0], *shape[1:]), dtype=dtype)
                dist.all_gather_into_tensor(whole, mine)
                same(whole, torch.cat(expected))


@case()
@in_group
def all_gather_of_different_sizes() -> None:
    expected = [torch.full((2 * other, 3), float(other)) for other in range(size())]
    outputs = [torch.zeros_like(one) for one in expected]
    dist.all_gather(outputs, expected[rank()])
    for output, one in zip(outputs, expected, strict=True):
        same(output, one)


@case(least=2)
@in_group
def all_gather_of_sizes_that_ranks_disagree_about() -> None:
    mine = torch.ones(rank() + 1)
    outputs = [torch.zeros(other + 1) for other in range(size())]
    with pytest.raises(ValueError, match=f"with this rank's {rank() + 1} elements at {rank()}"):
        dist.all_gather([*outputs[1:], outputs[0]], mine)
    with pytest.raises(ValueError, match=f"one for each of the {size()} ranks"):
        dist.all_gather([*outputs, mine], mine)
    dist.barrier()
    if rank() == 0:
        outputs[1] = torch.zeros(7)
        with pytest.raises(MismatchError, match="received 2 rows from rank 1, but has room for 7"):
            dist.all_gather(outputs, mine)
    else:
        dist.all_gather(outputs, mine)
        same(outputs[0], torch.ones(1))
    dist.barrier()
    one_size = [torch.zeros(1) for _ in range(size())]
    with pytest.raises(MismatchError):
        dist.all_gather(one_size if rank() == 0 else outputs, mine)
    dist.barrier()


@case(least=2)
@in_group
def all_to_all_into_the_head_of_its_input() -> None:
    """The memory behind the output is read until the end."""
    sent, received = [1] + [2] * (size() - 1), [1 if rank() == 0 else 2] * size()
    inputs = [torch.arange(float(sum(sent))) + 100 * other for other in range(size())]
    output = inputs[0][: size()] if rank() == 0 else torch.empty(2 * size())
    expected = torch.cat([one.split(sent)[rank()] for one in inputs])
    if rank():
        hvd.broadcast(torch.ones(1), 0, name="go")
    work = dist.all_to_all_single(output, inputs[rank()], received, sent, async_op=True)
    assert work is not None
    if rank() == 0:
        with pytest.raises(ValueError, match="still in flight"):
            dist.irecv(inputs[0][size() :], 1)
        hvd.broadcast(torch.ones(1), 0, name="go")
    work.wait()
    same(output, expected)


@case()
@in_group
def all_gather_in_place_and_strided() -> None:
    whole = torch.zeros(size(), 4)
    whole[rank()] = values(rank(), (4,), torch.float32)
    dist.all_gather_into_tensor(whole, whole[rank()])
    same(whole, torch.stack(of_all((4,), torch.float32)))
    wide = torch.zeros(size() * 3, 4)
    narrow = wide[:, 1:3]
    dist.all_gather_into_tensor(narrow, values(rank(), (2, 3), torch.float32).t())
    same(narrow, torch.cat([one.t() for one in of_all((2, 3), torch.float32)]))
    assert (wide[:, 0] == 0).all()


@case()
@in_group
def gather_and_scatter() -> None:
    for dtype in DTYPES:
        for shape in [(), (0,), (3, 2)]:
            for root in range(size()):
                mine = values(rank(), shape, dtype)
                outputs = [torch.zeros_like(mine) for _ in range(size())] if rank() == root else None
                dist.gather(mine, outputs, root)
                for output, one in zip(outputs or [], of_all(shape, dtype), strict=bool(outputs)):
                    same(output, one)
                received = torch.zeros_like(mine)
                dist.scatter(received, of_all(shape, dtype) if rank() == root else None, root)
                same(received, mine)


@case(least=2)
@in_group
def roots_that_disagree() -> None:
    mine = torch.ones(2)
    outputs = [torch.zeros(2) for _ in range(size())]
    with pytest.raises(MismatchError, match="disagree about the sizes, or about the root"):
        dist.gather(mine, outputs, rank())
    with pytest.raises(MismatchError):
        dist.broadcast(mine, rank())
    dist.barrier()


@case()
@in_group
def all_to_all() -> None:
    for dtype in FLOATS:
        mine = [values(rank() + 2 * other, (2, 3), dtype) for other in range(size())]
        outputs = [torch.zeros_like(mine[0]) for _ in range(size())]
        dist.all_to_all(outputs, mine)
        for other, output in enumerate(outputs):
            same(output, values(other + 2 * rank(), (2, 3), dtype))
        whole = torch.zeros(size() * 2, 3, dtype=dtype)
        dist.all_to_all_single(whole, torch.cat(mine))
        same(whole, torch.cat(outputs))


@case(least=2)
@in_group
def a_barrier_waits_for_all() -> None:
    reached = threading.Event()
    waited = False
    if rank() == 0:
        time.sleep(0.2)
        reached.set()
        hvd.broadcast_object(time.monotonic(), 0, name="reached")
        dist.barrier()
    else:
        work = dist.barrier(async_op=True)
        assert not work.is_completed()
        at = hvd.broadcast_object(None, 0, name="reached")
        work.wait()
        waited = time.monotonic() >= at
    assert waited or reached.is_set()


@case(least=2)
@in_group
def calls_with_wrong_lists_are_refused() -> None:
    """No list of a wrong length is cut, and no tensor of another size or dtype is written."""
    size = dist.get_world_size()
    ones = torch.ones(2)
    refused: list[Callable[[], Any]] = [
        lambda: dist.all_gather([torch.zeros(2)] * (size + 1), ones),
        lambda: dist.all_gather([torch.zeros(2, dtype=torch.int32)] * size, ones),
        lambda: dist.all_gather_into_tensor(torch.zeros(size), ones),
        lambda: dist.all_gather_coalesced([[torch.zeros(2)]] * (size + 1), [ones]),
        lambda: dist.all_gather_coalesced([[torch.zeros(2)] * 2] * size, [ones]),
        lambda: dist.reduce_scatter(torch.zeros(2), [ones] * (size + 1)),
        lambda: dist.reduce_scatter_tensor(torch.zeros(2), ones),
        lambda: dist.all_to_all([torch.zeros(2)] * (size + 1), [ones] * size),
        lambda: dist.gather(ones, [torch.zeros(2)] * (size + 1), dst=dist.get_rank()),
        lambda: dist.scatter(torch.zeros(2), [ones] * (size + 1), src=dist.get_rank()),
    ]
    for call in refused:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            call()
    with pytest.raises(ValueError, match="output_split_sizes"):
        dist.all_to_all_single(torch.zeros(size), torch.ones(size), [1] * (size + 1), [1] * size)
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="one list for each"):
        dist.all_gather_coalesced([[torch.zeros(2)]], [ones])
    dist.barrier()
