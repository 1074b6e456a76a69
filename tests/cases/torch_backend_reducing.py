"""The backend's all-reduces, reduces and reduce-scatters, against exact results and against gloo."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cases import case
from cases.torch_backend_groups import (
    FLOATS,
    INTEGERS,
    SHAPES,
    everyone,
    gloo_group,
    in_group,
    rank,
    same,
    size,
    values,
)
from sirtaki.common.exceptions import MismatchError, UnsupportedError

ReduceOp = dist.ReduceOp
OPS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "SUM": (ReduceOp.SUM, lambda ranks: ranks.sum(0)),
    "AVG": (ReduceOp.AVG, lambda ranks: ranks.sum(0) / ranks.shape[0]),
    "MIN": (ReduceOp.MIN, lambda ranks: ranks.amin(0)),
    "MAX": (ReduceOp.MAX, lambda ranks: ranks.amax(0)),
    "PRODUCT": (ReduceOp.PRODUCT, lambda ranks: ranks.prod(0)),
}
BITWISE: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "BAND": (ReduceOp.BAND, torch.bitwise_and),
    "BOR": (ReduceOp.BOR, torch.bitwise_or),
    "BXOR": (ReduceOp.BXOR, torch.bitwise_xor),
}


@case(op=OPS)
@in_group
def all_reduce(op: str) -> None:
    reduce_op, combine = OPS[op]
    dtypes = FLOATS if op == "AVG" else (*FLOATS, *INTEGERS)
    for dtype in dtypes:
        for shape in SHAPES:
            tensor = values(rank(), shape, dtype)
            dist.all_reduce(tensor, reduce_op)
            same(tensor, combine(everyone(shape, torch.float64)).to(dtype))


@case()
@in_group
def all_reduce_like_gloo() -> None:
    gloo = gloo_group()
    generator = torch.Generator().manual_seed(rank())
    for dtype in (torch.float32, torch.float64):
        for count in (1, 1000, 100_001):
            mine = torch.randn(count, generator=generator, dtype=dtype)
            ours, theirs = mine.clone(), mine.clone()
            dist.all_reduce(ours)
            dist.all_reduce(theirs, group=gloo)
            if size() == 2:  # any order of two terms gives the same bits
                same(ours, theirs)
            torch.testing.assert_close(ours, theirs)


@case(op=BITWISE)
@in_group
def bitwise(op: str) -> None:
    reduce_op, combine = BITWISE[op]
    for dtype in (*INTEGERS, torch.bool):
        for shape in SHAPES:
            tensor = values(rank(), shape, dtype)
            expected = values(0, shape, dtype)
            for other in range(1, size()):
                expected = combine(expected, values(other, shape, dtype))
            dist.all_reduce(tensor, reduce_op)
            same(tensor, expected)
            mine, part = values(rank(), (size(), *shape), dtype), torch.empty(shape, dtype=dtype)
            dist.reduce_scatter_tensor(part, mine, reduce_op)
            dist.all_reduce(mine, reduce_op)
            same(part, mine[rank()])
    with pytest.raises(UnsupportedError, match=f"^{op} cannot .* bitwise operations are for integers"):
        dist.all_reduce(torch.ones(2), reduce_op)


@case()
@in_group
def truth_values() -> None:
    for op, expected in ((ReduceOp.SUM, True), (ReduceOp.MAX, True), (ReduceOp.MIN, size() == 1)):
        tensor = torch.tensor([rank() == 0, True])
        dist.all_reduce(tensor, op)
        same(tensor, torch.tensor([expected, True]))
    with pytest.raises(UnsupportedError, match="bool"):
        dist.all_reduce(torch.tensor([True]), ReduceOp.AVG)


@case()
@in_group
def premultiplied_sum() -> None:
    from torch.distributed import _make_nccl_premul_sum

    tensor, op = values(rank(), (9,), torch.float32), _make_nccl_premul_sum(0.5)
    if not hasattr(op, "factor"):  # with an older torch
        with pytest.raises(UnsupportedError, match="a torch that lets it be read"):
            dist.all_reduce(tensor, op)
        return
    dist.all_reduce(tensor, op)
    same(tensor, everyone((9,), torch.float32).sum(0) / 2)


@case()
@in_group
def memory_orders() -> None:
    expected = everyone((2, 3, 4, 5), torch.float32).sum(0)
    mine = values(rank(), (2, 3, 4, 5), torch.float32)
    ordered = mine.to(memory_format=torch.channels_last)
    wide = torch.full((2, 3, 4, 10), -1.0)
    strided = wide[..., ::2]
    strided.copy_(mine)
    for tensor in (ordered, strided, mine.transpose(0, 3).contiguous().transpose(0, 3)):
        dist.all_reduce(tensor)
        same(tensor, expected)
    assert (wide[..., 1::2] == -1).all()
    with pytest.raises(ValueError, match="expanded"):
        dist.all_reduce(torch.ones(1).expand(4))


@case()
@in_group
def complex_numbers() -> None:
    tensor = torch.complex(torch.full((3,), float(rank())), torch.ones(3))
    dist.all_reduce(tensor)
    same(tensor, torch.complex(torch.full((3,), float(sum(range(size())))), torch.full((3,), float(size()))))


@case()
@in_group
def reduce_to_each_rank() -> None:
    for root in range(size()):
        for op in ("SUM", "MAX"):
            tensor = values(rank(), (5, 2), torch.float32)
            dist.reduce(tensor, root, OPS[op][0])
            if rank() == root:
                same(tensor, OPS[op][1](everyone((5, 2), torch.float32)))
            else:
                same(tensor, values(rank(), (5, 2), torch.float32))
        bits = values(rank(), (5,), torch.int32)
        dist.reduce(bits, root, ReduceOp.BOR)
        expected = values(0, (5,), torch.int32)
        for other in range(1, size()):
            expected = expected | values(other, (5,), torch.int32)
        same(bits, expected if rank() == root else values(rank(), (5,), torch.int32))


@case(op=OPS)
@in_group
def reduce_scatter(op: str) -> None:
    reduce_op, combine = OPS[op]
    for dtype in FLOATS:
        for shape in [(size(), 3), (size() * 4,), (size(), 0)]:
            mine = values(rank(), shape, dtype)
            expected = combine(everyone(shape, torch.float64)).to(dtype).chunk(size())[rank()]
            output = torch.empty_like(expected)
            dist.reduce_scatter_tensor(output, mine, reduce_op)
            same(output, expected)
            parts = [part.clone() for part in mine.chunk(size())]
            listed = torch.empty_like(expected)
            dist.reduce_scatter(listed, parts, reduce_op)
            same(listed, expected)


@case()
@in_group
def reduce_scatter_sums_like_all_reduce() -> None:
    mine = torch.randn(size() * 10_007, generator=torch.Generator().manual_seed(rank()))
    output = torch.empty(10_007)
    dist.reduce_scatter_tensor(output, mine)
    dist.all_reduce(mine)
    same(output, mine.chunk(size())[rank()])


@case()
@in_group
def reduce_scatter_in_its_input() -> None:
    mine = values(rank(), (size() * 6,), torch.float32)
    output = mine.chunk(size())[rank()]
    dist.reduce_scatter_tensor(output, mine)
    same(output, everyone((size() * 6,), torch.float32).sum(0).chunk(size())[rank()])
    with pytest.raises(ValueError, match="elements instead of"):
        dist.reduce_scatter_tensor(torch.ones(2), torch.ones(size()))


@case()
@in_group
def reduce_scatter_of_different_sizes() -> None:
    parts = [values(rank(), (2 * number,), torch.float32) for number in range(size())]
    output = torch.empty(2 * rank())
    dist.reduce_scatter(output, parts)
    same(output, everyone((2 * rank(),), torch.float32).sum(0))
    if size() > 1:
        with pytest.raises(ValueError, match="elements instead of"):
            dist.reduce_scatter(torch.empty(9), parts)


@case(least=2)
@in_group
def ranks_that_disagree() -> None:
    with pytest.raises(MismatchError):
        dist.all_reduce(torch.ones(3 if rank() else 2))
    with pytest.raises(MismatchError):
        dist.all_reduce(torch.ones(2)) if rank() else dist.broadcast(torch.ones(2), 0)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    same(tensor, torch.full((2,), float(size())))


@case(least=2)
@in_group
def a_disagreement_names_the_line() -> None:
    """The wait may be far from the call, and each rank's call at another line."""

    def start() -> dist.Work:
        return dist.all_reduce(torch.ones(3 if rank() else 2), async_op=True)

    work = start()
    line = start.__code__.co_firstlineno + 1
    place = rf"\(this rank started it in start\(\) at torch_backend_reducing\.py:{line}\)$"
    with pytest.raises(MismatchError, match=place):
        work.wait()
    assert re.search(place, str(work.exception()))
