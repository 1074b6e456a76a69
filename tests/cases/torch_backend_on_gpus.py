"""The backend on GPUs: on real GPUs where there are any (tests/gpu), else on the fakes'."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cases import case
from cases.torch_backend_groups import in_group
from cases.torch_gpu import (
    assert_equal_parameters,
    batches,
    joined,
    make_model,
    of_all,
    own_device,
    pattern,
    same,
    side_stream,
    train,
)
from sirtaki.common.exceptions import UnsupportedError

COUNT = 300_000


def of_this_rank() -> Tensor:
    return pattern(COUNT, dist.get_rank()).to(own_device())


@case()
@in_group
def a_stream_of_its_own() -> None:
    """The operation begins after the work of its stream, and the waiting stream after the operation."""
    with side_stream():
        mine = of_this_rank()
        for _ in range(30):  # enough work to wait for
            mine = mine * 1
        work = dist.all_reduce(mine, async_op=True)
        assert work is not None
    work.wait()  # in the default stream
    same(mine * 2, of_all(COUNT).sum(0) * 2)
    same(work.result()[0], of_all(COUNT).sum(0))
    while not work.is_completed():
        pass
    assert work.is_success()


@case()
@in_group
def futures() -> None:
    """A callback and a waiting thread may use the value in their own streams."""
    expected = of_all(COUNT).sum(0)
    works = [dist.all_reduce(of_this_rank(), async_op=True) for _ in range(5)]
    doubled = [work.get_future().then(lambda future: future.value()[0] * 2) for work in works]
    for future in doubled:
        same(future.wait(), expected * 2)
    late = works[0].get_future()  # after its end
    same(late.wait()[0], expected)


@case()
@in_group
def every_operation() -> None:
    size, rank, mine = dist.get_world_size(), dist.get_rank(), of_this_rank()
    everyone = of_all(COUNT)
    gathered = torch.empty(size * COUNT, device=mine.device)
    dist.all_gather_into_tensor(gathered, mine)
    same(gathered, everyone.view(-1))
    dist.broadcast(mine, size - 1)
    same(mine, everyone[-1])
    part = torch.empty(COUNT // size, device=mine.device)
    dist.reduce_scatter_tensor(part, of_this_rank()[: COUNT // size * size])
    same(part, everyone.sum(0)[: COUNT // size * size].view(size, -1)[rank])
    different = [torch.empty(other + 1, device=mine.device) for other in range(size)]
    dist.all_gather(different, torch.full((rank + 1,), float(rank), device=mine.device))
    for other, one in enumerate(different):
        same(one, torch.full((other + 1,), float(other)))
    exchanged = torch.empty(size, 5, device=mine.device)
    dist.all_to_all_single(exchanged, torch.full((size, 5), float(rank), device=mine.device))
    same(exchanged, torch.arange(size).float().view(-1, 1).expand(size, 5))
    if size > 1:
        received = torch.empty(COUNT, device=mine.device)
        sending = dist.isend(of_this_rank(), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        assert sending is not None
        sending.wait()
        same(received, everyone[(rank - 1) % size])
    dist.barrier()


@case(least=2)
@in_group
def from_any_rank_into_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="into tensors on the CPU only"):
        dist.recv(of_this_rank())


@case()
@in_group
def training_does_what_one_process_does_on_the_cpu() -> None:
    def sgd(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    alone, of_ranks = make_model(), [batches(rank, 4) for rank in range(dist.get_world_size())]
    train(alone, sgd(alone), joined(of_ranks))
    model = DistributedDataParallel(make_model().to(own_device()), bucket_cap_mb=0.005)
    train(model, sgd(model), of_ranks[dist.get_rank()])
    assert_equal_parameters(model, alone)


@case()
@in_group
def fully_sharded_training_does_what_one_process_does_on_the_cpu() -> None:
    alone, of_ranks = make_model(), [batches(rank, 4) for rank in range(dist.get_world_size())]
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), joined(of_ranks))
    model = make_model().to(own_device())
    for module in (model[0], model[2], model):
        fully_shard(module)
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), of_ranks[dist.get_rank()])
    found = [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]  # type: ignore[attr-defined]
    torch.testing.assert_close(found, [one.detach() for one in alone.parameters()], rtol=1e-8, atol=1e-10)
