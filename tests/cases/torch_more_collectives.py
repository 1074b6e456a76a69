"""Reduce-scatter, all-to-all, groups, pairs of ranks and process sets, for torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sirtaki.torch as hvd
from cases import case
from cases.torch_collectives import OPS, everyone, same, values

DTYPES = (torch.int16, torch.int64, torch.bfloat16, torch.float64)
SHAPES = [(1,), (7,), (5, 3), (0, 2), (4, 0), (70_001,)]


def rows_of(whole: Tensor, rank: int) -> Tensor:
    """Returns a rank's rows of a reduce-scatter."""
    return whole.tensor_split(hvd.size())[rank]


@case(op=OPS)
def reducescatter(op: str) -> None:
    code, combine = OPS[op]
    for dtype in DTYPES:
        for shape in SHAPES:
            mine = values(hvd.rank(), shape, dtype)
            expected = rows_of(combine(everyone(shape, torch.float64)).to(dtype), hvd.rank())
            same(hvd.reducescatter(mine, op=code), expected)
            same(hvd.reducescatter_async(mine, op=code).wait(), expected)
    scaled = hvd.reducescatter(torch.ones(4), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert (scaled == 2.0 * hvd.size()).all()
    small = hvd.reducescatter(torch.full((6,), 2.0), compression=hvd.Compression.fp16)
    same(small, rows_of(torch.full((6,), 2.0), hvd.rank()))


@case()
def alltoall_in_equal_parts() -> None:
    for dtype in (*DTYPES, torch.bool, torch.complex64):
        mine = values(hvd.rank(), (2 * hvd.size(), 3), dtype)
        parts = [values(rank, (2 * hvd.size(), 3), dtype).chunk(hvd.size())[hvd.rank()] for rank in ranks()]
        same(hvd.alltoall(mine), torch.cat(parts))
        same(hvd.alltoall_async(mine).wait(), torch.cat(parts))


def ranks() -> range:
    return range(hvd.size())


def splits_of(rank: int) -> list[int]:
    """Returns the number of rows that a rank sends to each: sometimes zero."""
    return [(rank + other) % 3 for other in ranks()]


@case(kind=["list", "tensor"])
def alltoall_in_unequal_parts(kind: str) -> None:
    def rows(rank: int) -> Tensor:
        return torch.arange(sum(splits_of(rank)) + 1) + 100 * rank  # one row more than is sent

    splits: Any = splits_of(hvd.rank())
    if kind == "tensor":
        splits = torch.tensor(splits, dtype=torch.int32)
    expected = torch.cat([rows(rank)[:-1].split(splits_of(rank))[hvd.rank()] for rank in ranks()])
    counts = torch.tensor([splits_of(rank)[hvd.rank()] for rank in ranks()], dtype=torch.int32)
    for result, received in (
        hvd.alltoall(rows(hvd.rank()), splits),
        hvd.alltoall_async(rows(hvd.rank()), splits=splits).wait(),
    ):
        same(result, expected)
        same(received, counts)


@case()
def alltoall_with_splits_that_do_not_fit() -> None:
    wrong: list[tuple[Any, str]] = [
        ([1] * (hvd.size() + 1), "all-to-all"),
        ([5] * hvd.size(), "all-to-all"),
        ([-1] * hvd.size(), "all-to-all"),
        ([0.5] * hvd.size(), "whole numbers"),
        (torch.ones(hvd.size()), "int32"),
        (torch.ones(hvd.size(), dtype=torch.int64), "int32"),
    ]
    for splits, text in wrong:
        with pytest.raises(ValueError, match=text):
            hvd.alltoall(torch.ones(4), splits)
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="all-to-all"):
            hvd.alltoall(torch.ones(hvd.size() + 1))
    with pytest.raises(ValueError, match="dimension"):
        hvd.alltoall(torch.tensor(1.0))


def members() -> list[Tensor]:
    """Returns tensors of several dtypes and shapes."""
    kinds = [((3, 2), torch.float32), ((4,), torch.int64), ((2, 1), torch.float64)]
    return [values(hvd.rank(), shape, dtype) for shape, dtype in kinds]


def totals() -> list[Tensor]:
    return [everyone(tuple(one.shape), one.dtype).sum(0).to(one.dtype) for one in members()]


@case(form=["allreduce", "allreduce_async", "allreduce_", "allreduce_async_", "named", "compressed"])
def groups_that_are_reduced(form: str) -> None:
    options: dict[str, Any] = {"op": hvd.Sum}
    for _ in range(3):
        tensors = members()
        if form == "named":
            results = hvd.grouped_allreduce(tensors, name="all of them", **options)
        elif form == "compressed":
            results = hvd.grouped_allreduce(tensors, compression=hvd.Compression.fp16, **options)
        else:
            results = getattr(hvd, f"grouped_{form}")(tensors, **options)
        if "async" in form:
            results = hvd.synchronize(results)
        for result, expected, tensor in zip(results, totals(), tensors, strict=True):
            same(result, expected)
            assert (result is tensor) == form.endswith("_")


@case(form=["", "_async"])
def groups_that_are_scattered_and_gathered(form: str) -> None:
    def ended(result: Any) -> Any:
        return result.wait() if form else result

    scattered = ended(getattr(hvd, f"grouped_reducescatter{form}")(members(), op=hvd.Sum))
    for result, total in zip(scattered, totals(), strict=True):
        same(result, rows_of(total, hvd.rank()))
    for result, total in zip(
        ended(getattr(hvd, f"grouped_allgather{form}")(scattered)), totals(), strict=True
    ):
        same(result, total)


@case()
def groups_of_none() -> None:
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_allgather_async([]).wait() == []


@case()
def adasum() -> None:
    """Parallel vectors of the ranks are averaged, orthogonal vectors are added."""
    if hvd.size() & (hvd.size() - 1) == 0:
        same(hvd.allreduce(torch.tensor([3.0, 4.0]), op=hvd.Adasum), torch.tensor([3.0, 4.0]))
        mine = torch.zeros(hvd.size())
        mine[hvd.rank()] = 2.0
        same(hvd.allreduce(mine, op=hvd.Adasum), torch.full((hvd.size(),), 2.0))


@case(least=2, form=["", "_async"])
def pairs_of_ranks(form: str) -> None:
    """Each rank sends to the next one."""
    after, before = (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()
    handle = hvd.send_async(torch.arange(5) + hvd.rank(), after, name="ring")
    target = torch.zeros(5, dtype=torch.int64)
    received = getattr(hvd, f"recv{form}")(target, before, name="ring")
    received = received.wait() if form else received
    handle.wait()
    assert received is target
    same(target, torch.arange(5) + before)
    gaps = torch.zeros(4, 2)[:, 0]
    if hvd.rank() == 0:
        hvd.send(torch.ones(4), 1)
    elif hvd.rank() == 1:
        assert hvd.recv(gaps, 0).tolist() == [1.0] * 4


OVER_SETS: dict[str, Callable[[Tensor, Any], Any]] = {
    "allreduce": lambda x, some: hvd.allreduce(x, op=hvd.Sum, process_set=some),
    "allreduce_": lambda x, some: hvd.allreduce_(x, op=hvd.Sum, process_set=some),
    "grouped_allreduce": lambda x, some: hvd.grouped_allreduce([x], op=hvd.Sum, process_set=some)[0],
    "reducescatter": lambda x, some: hvd.allgather(
        hvd.reducescatter(x, op=hvd.Sum, process_set=some), process_set=some
    ),
    "broadcast": lambda x, some: hvd.broadcast(x, some.ranks[-1], process_set=some),
    "object": lambda x, some: hvd.broadcast_object(x, some.ranks[-1], process_set=some),
}


@case(least=2, name=OVER_SETS)
def process_sets(name: str) -> None:
    """Two sets operate at the same time; ranks that belong to neither continue alone."""
    halves = [hvd.add_process_set(list(ranks())[half::2]) for half in (0, 1)]
    hvd.barrier(halves[hvd.rank() % 2])
    mine = halves[hvd.rank() % 2]
    with pytest.raises(ValueError, match=r"not a member|does not belong"):
        hvd.allreduce(torch.ones(2), process_set=halves[1 - hvd.rank() % 2])
    for _ in range(3):
        result = OVER_SETS[name](torch.full((3, 2), float(hvd.rank())), mine)
        last = name in ("broadcast", "object")
        assert (result == float(mine.ranks[-1] if last else sum(mine.ranks))).all()
    for half in halves:
        assert hvd.remove_process_set(half)
