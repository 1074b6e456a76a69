"""Groups whose ranks are in another order than those of the world; `torch_backend_calls` has each call."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cases import case
from cases.torch_backend_groups import in_group, same
from sirtaki.common.exceptions import MismatchError


def keeps_order() -> bool:
    """Returns whether this torch has groups in another order; older ones always sort the ranks."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def orders() -> list[list[int]]:
    """Returns orders of all ranks and of some, none of them ascending."""
    size = dist.get_world_size()
    found = [list(reversed(range(size)))]
    if size > 2:
        found += [[1, 2, 0], [size - 1, 0], [*range(1, size), 0], [0, *range(2, size), 1]]
    return found


def mine(*shape: int) -> Tensor:
    """Returns values that differ from rank to rank and from element to element; their sums are exact."""
    count = int(torch.Size(shape).numel())
    return (torch.arange(float(count)) + 1000 * dist.get_rank()).reshape(shape)


def group_of(ranks: Sequence[int]) -> Any:
    """Returns a group of these ranks in this order; None on the other ranks."""
    group = dist.new_group(ranks, sort_ranks=False)
    return group if dist.get_rank() in ranks else None


def rows_of(group: Any, ranks: Sequence[int]) -> None:
    """Gathers tensors of different sizes, in the order of the ranks."""
    outputs = [torch.zeros(rank + 1) for rank in ranks]
    dist.all_gather(outputs, torch.full((dist.get_rank() + 1,), float(dist.get_rank())), group=group)
    for output, rank in zip(outputs, ranks, strict=True):
        same(output, torch.full((rank + 1,), float(rank)))


@case(least=2)
@in_group
def what_gloo_does_not_have() -> None:
    """Different sizes, bitwise operations, stacked and strided outputs, and a sender that nobody names."""
    for ranks in orders() if keeps_order() else []:
        group = group_of(ranks)
        if group is None:
            continue
        rows_of(group, ranks)
        bits = torch.tensor([1 << dist.get_rank()])
        dist.all_reduce(bits, dist.ReduceOp.BXOR, group=group)
        assert bits.item() == sum(1 << rank for rank in ranks)
        stacked = torch.zeros(len(ranks), 4)
        dist.all_gather_into_tensor(stacked, mine(4), group=group)
        same(stacked, torch.stack([torch.arange(4.0) + 1000 * rank for rank in ranks]))
        wide = torch.zeros(len(ranks) * 2, 4)
        dist.all_gather_into_tensor(wide[:, 1:3], mine(2, 2), group=group)
        same(wide[:, 1], torch.cat([torch.tensor([0.0, 2.0]) + 1000 * rank for rank in ranks]))
        assert (wide[:, 0] == 0).all()
        if group.rank() == 0:
            received = torch.zeros(1)
            assert dist.recv(received, group=group) == ranks[1]
            assert received.item() == 1000 * ranks[1]
        elif group.rank() == 1:
            dist.send(mine(1), group=group, group_dst=0)


@case(least=2)
@in_group
def orders_of_the_same_ranks() -> None:
    """Groups of the same ranks in different orders are independent, whichever each rank uses first."""
    if not keeps_order():
        with pytest.raises(TypeError, match="sort_ranks"):
            group_of([1, 0])
        return
    ascending = list(range(dist.get_world_size()))
    used = [(dist.group.WORLD, ascending), (group_of(ascending[::-1]), ascending[::-1])]
    if dist.get_rank() % 2:
        used.reverse()
    found = [torch.zeros(len(ascending)) for _ in used]
    works = [
        dist.all_gather_into_tensor(whole, mine(1) + ranks[0], group=group, async_op=True)
        for whole, (group, ranks) in zip(found, used, strict=True)
    ]
    for work in works:
        assert work is not None
        work.wait()
    for whole, (_, ranks) in zip(found, used, strict=True):
        same(whole, torch.tensor([1000.0 * rank + ranks[0] for rank in ranks]))


@case(least=2)
@in_group
def a_sender_of_too_much_is_named() -> None:
    if not keeps_order() or dist.get_rank() > 1:
        return
    group = dist.new_group([1, 0], use_local_synchronization=True, sort_ranks=False)
    received = torch.zeros(2)
    if dist.get_rank() == 0:
        with pytest.raises(MismatchError, match="rank 0 received 3 rows from rank 1, but has room for 1"):
            dist.all_to_all_single(received, torch.ones(2), [1, 1], [1, 1], group=group)
    else:
        dist.all_to_all_single(received, torch.ones(4), [1, 1], [1, 3], group=group)
