"""Groups of some of the ranks over the backend."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sirtaki.torch as hvd
from cases import case
from cases.torch_backend_groups import in_group, rank, same, size
from cases.torch_backend_sharding import batch, model, over_both, train, whole
from sirtaki.common.exceptions import DeadlineError


def check(group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Runs each kind of operation in a group."""
    own, count = ranks.index(rank()), len(ranks)
    total = torch.full((3,), float(rank()))
    dist.all_reduce(total, group=group)
    same(total, torch.full((3,), float(sum(ranks))))
    for root in ranks:
        copied = torch.full((2,), float(rank()))
        dist.broadcast(copied, root, group=group)
        same(copied, torch.full((2,), float(root)))
        gathered = [torch.zeros(1) for _ in ranks] if rank() == root else None
        dist.gather(torch.full((1,), float(rank())), gathered, root, group=group)
        assert gathered is None or [one.item() for one in gathered] == ranks
    everyone = torch.zeros(count)
    dist.all_gather_into_tensor(everyone, torch.full((1,), float(rank())), group=group)
    assert everyone.tolist() == ranks
    mine = torch.zeros(1)
    dist.reduce_scatter_tensor(mine, torch.arange(float(count)), group=group)
    same(mine, torch.full((1,), float(own * count)))
    received = torch.zeros(count)
    dist.all_to_all_single(received, torch.full((count,), float(rank())), group=group)
    assert received.tolist() == ranks
    dist.barrier(group)
    if count > 1:
        following, preceding = ranks[(own + 1) % count], ranks[(own - 1) % count]
        work = dist.isend(torch.full((1,), float(rank())), following, group=group)
        dist.recv(mine, preceding, group=group)
        assert work is not None
        work.wait()
        assert mine.item() == preceding


@case(least=2)
@in_group
def all_groups() -> None:
    """Every rank calls new_group for all of them; each belongs to some."""
    rankings = [[one] for one in range(size())] + [list(range(size())), list(range(1, size()))]
    rankings += [list(range(0, size(), 2)), list(range(1, size(), 2)), list(range(size() - 1))]
    groups = [dist.new_group(ranks) for ranks in rankings]
    for _ in range(2):
        for group, ranks in zip(groups, rankings, strict=True):
            if rank() in ranks:
                check(group, ranks)


@case(least=2)
@in_group
def only_members_create_it() -> None:
    for ranks in ([0, size() - 1], [0], list(range(1, size()))):
        if rank() in ranks:
            check(dist.new_group(ranks, use_local_synchronization=True), ranks)


@case(least=4)
@in_group
def overlapping_groups_in_different_orders() -> None:
    """Creating a group waits for nobody, so that no order of creations blocks."""
    rankings = [[0, 1], [1, 2], [2, 3], [0, 3]]
    mine = [ranks for ranks in rankings if rank() in ranks]
    if rank() % 2:
        mine.reverse()
    groups = {tuple(ranks): dist.new_group(ranks, use_local_synchronization=True) for ranks in mine}
    for ranks in rankings:
        if rank() in ranks:
            check(groups[tuple(ranks)], ranks)


@case(least=2)
@in_group
def groups_of_the_same_ranks() -> None:
    """They are independent, and one may end on one rank before it ends on the others."""
    ranks = list(range(1, size()))
    first, second = dist.new_group(ranks), dist.new_group(ranks)
    if rank() == 0:
        return
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in (first, second)]
    for work in reversed(works):
        work.wait()
    if rank() % 2:
        dist.destroy_process_group(first)
    check(second, ranks)
    if not rank() % 2:
        dist.destroy_process_group(first)


@case(least=2)
@in_group
def beside_process_sets() -> None:
    """A set of Horovod's calls may have the ranks of a group."""
    ranks = list(range(1, size()))
    group = dist.new_group(ranks)
    if rank() in ranks:
        check(group, ranks)
    process_set = hvd.add_process_set(ranks)
    if rank() in ranks:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=process_set).item() == len(ranks)
        work.wait()
    hvd.remove_process_set(process_set)
    if rank() in ranks:
        check(group, ranks)


@case(least=4)
@in_group
def a_member_that_creates_no_group() -> None:
    ranks = [0, size() - 1]
    if rank() == 0:
        group = dist.new_group(ranks, timedelta(seconds=0.05), use_local_synchronization=True)
        with pytest.raises(DeadlineError, match="have created their process group"):
            dist.all_reduce(torch.ones(1), group=group)
        group.timeout = timedelta(minutes=5)
    dist.barrier()
    if rank() == size() - 1:
        group = dist.new_group(ranks, use_local_synchronization=True)
    if rank() in ranks:
        check(group, ranks)  # the ranks agree about its operations, though one has tried more often
        check(dist.new_group(ranks, use_local_synchronization=True), ranks)


@case(least=4)
def sharded_in_two_dimensions() -> None:
    """HSDP: replicas of shards, on a mesh of 2 x 2."""

    def run() -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, size() // 2), mesh_dim_names=("replicate", "shard"))
        net: nn.Module = model()
        fully_shard(net, mesh=mesh)
        losses = train(net, lambda step: batch(step, rank()))
        return [*losses, *(whole(parameter) for parameter in net.parameters())]

    over_both(run)


@case(least=2)
@in_group
def calls_that_make_groups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def summed(group: Any) -> float:
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor, group=group)
        return tensor.item()

    assert summed(dist.new_subgroups(1)[0]) == rank
    neighbours = [[first, first + 1] for first in range(0, size, 2)]
    group, _ = dist.new_subgroups_by_enumeration(neighbours)
    mine = next(pair for pair in neighbours if rank in pair)
    assert summed(group) == sum(mine)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    assert summed(mesh.get_group("inner")) == sum(mine)
    assert summed(mesh.get_group("outer")) == sum(range(rank % 2, size, 2))
    assert mesh.get_local_rank("inner") == rank % 2
    with pytest.raises(Exception, match="split"):
        dist.split_group(split_ranks=[list(range(size))])
    with pytest.raises(ValueError, match="monitored_barrier is only implemented for GLOO"):
        dist.monitored_barrier()
