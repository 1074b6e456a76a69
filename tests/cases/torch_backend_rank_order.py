"""Groups whose ranks are in another order than those of the world, over the backend and over gloo."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cases import case
from cases.torch_backend_groups import in_group, same
from sirtaki.common.exceptions import MismatchError

_never_destroyed: list[Any] = []  # see cases.torch_backend_groups

Operation = Callable[[Any], list[Tensor]]


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


def all_reduce(group: Any) -> list[Tensor]:
    results = [mine(5) for _ in range(2)]
    dist.all_reduce(results[0], group=group)
    dist.all_reduce(results[1], dist.ReduceOp.MAX, group=group)
    return results


def rooted(group: Any) -> list[Tensor]:
    """Runs the operations that have a root, to each rank of the group."""
    results = []
    for root in range(group.size()):
        is_root = group.rank() == root
        copied, summed = mine(4), mine(4)
        dist.broadcast(copied, group=group, group_src=root)
        dist.reduce(summed, group=group, group_dst=root)
        results += [copied, summed] if is_root else [copied]  # of the others, gloo leaves partial sums
        gathered = [torch.zeros(2, 2) for _ in range(group.size())] if is_root else None
        dist.gather(mine(2, 2), gathered, group=group, group_dst=root)
        results += gathered or []
        scattered = torch.zeros(3)
        parts = list(mine(group.size(), 3)) if is_root else None
        dist.scatter(scattered, parts, group=group, group_src=root)
        results.append(scattered)
    return results


def gathered(group: Any) -> list[Tensor]:
    listed = [torch.zeros(2, 3) for _ in range(group.size())]
    dist.all_gather(listed, mine(2, 3), group=group)
    whole = torch.zeros(group.size() * 2, 3)
    dist.all_gather_into_tensor(whole, mine(2, 3), group=group)
    return [*listed, whole]


def scattered(group: Any) -> list[Tensor]:
    one, listed = torch.zeros(2, 3), torch.zeros(2, 3)
    dist.reduce_scatter_tensor(one, mine(2 * group.size(), 3), group=group)
    parts = list(mine(2 * group.size(), 3).chunk(group.size()))
    dist.reduce_scatter(listed, parts, group=group)
    return [one, listed]


def exchanged(group: Any) -> list[Tensor]:
    """Exchanges parts of equal and of different sizes, in tensors and in lists."""
    size, own = group.size(), group.rank()
    even = torch.zeros(size * 2, 3)
    dist.all_to_all_single(even, mine(size * 2, 3), group=group)
    sent, received = [own + 2 * other for other in range(size)], [other + 2 * own for other in range(size)]
    uneven = torch.zeros(sum(received), 2)
    dist.all_to_all_single(uneven, mine(sum(sent), 2), received, sent, group=group)
    alike = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_to_all(alike, list(mine(size * 2, 3).chunk(size)), group=group)
    listed = [torch.zeros(count, 2) for count in received]
    if dist.get_backend(group) == "gloo":  # whose lists have tensors of one size only
        return [even, uneven, *alike, *uneven.split(received)]
    dist.all_to_all(listed, list(mine(sum(sent), 2).split(sent)), group=group)
    return [even, uneven, *alike, *listed]


def messages(group: Any) -> list[Tensor]:
    """Sends around a ring in the order of the group."""
    size, own = group.size(), group.rank()
    received, answered = torch.zeros(3), torch.zeros(3)
    sending = dist.isend(mine(3), group=group, group_dst=(own + 1) % size)
    dist.recv(received, group=group, group_src=(own - 1) % size)
    operations = [
        dist.P2POp(dist.irecv, answered, group=group, group_peer=(own + 1) % size),
        dist.P2POp(dist.isend, mine(3), group=group, group_peer=(own - 1) % size),
    ]
    works = [sending, *dist.batch_isend_irecv(operations)]
    for work in works:
        assert work is not None
        work.wait()
    return [received, answered]


def coalesced(group: Any) -> list[Tensor]:
    size = group.size()
    wholes, parts = [torch.zeros(size * count) for count in (1, 3)], [torch.zeros(count) for count in (1, 3)]
    with dist._coalescing_manager(group):
        for whole in wholes:
            dist.all_gather_into_tensor(whole, mine(len(whole) // size), group=group)
    with dist._coalescing_manager(group):
        for part in parts:
            dist.reduce_scatter_tensor(part, mine(len(part) * size), group=group)
    return [*wholes, *parts]


def objects(group: Any) -> list[Tensor]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, dist.get_rank(), group=group)
    return [torch.tensor(found)]


OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (
        all_reduce,
        rooted,
        gathered,
        scattered,
        exchanged,
        messages,
        coalesced,
        objects,
    )
}


def group_of(ranks: Sequence[int], backend: str | None = None) -> Any:
    """Returns a group of these ranks in this order; None on the other ranks."""
    group = dist.new_group(ranks, backend=backend, sort_ranks=False)
    if backend == "gloo":
        _never_destroyed.append(group)
    return group if dist.get_rank() in ranks else None


@case(least=2, operation=OPERATIONS)
@in_group
def like_gloo(operation: str) -> None:
    if not keeps_order():
        with pytest.raises(TypeError, match="sort_ranks"):
            group_of([1, 0])
        return
    for ranks in orders():
        ours, theirs = group_of(ranks), group_of(ranks, "gloo")
        if ours is None:
            continue
        assert (ours.rank(), ours.size()) == (ranks.index(dist.get_rank()), len(ranks))
        found, expected = OPERATIONS[operation](ours), OPERATIONS[operation](theirs)
        assert found
        for one, other in zip(found, expected, strict=True):
            same(one, other)


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
