"""Training over the backend with torch's own means, against the same training over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from cases import case
from cases.torch_backend_groups import default_group, same
from cases.torch_backend_sharding import over_both, train, whole
from sirtaki.common.exceptions import MismatchError

Build = Callable[[nn.Module], torch.optim.Optimizer]


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(5, 6, generator=generator).double(), torch.randn(5, 3, generator=generator).double()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def compare(net_of: Callable[[], nn.Module], optimizer_of: Build = sgd) -> None:
    """Compares losses and parameters of a training over sirtaki with those over gloo."""

    def run() -> list[Tensor]:
        net = net_of()
        losses = train(net, batch, optimizer_of(net))
        return [*losses, *(whole(parameter) for parameter in net.parameters())]

    over_both(run)


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
}


@case(options=DDP_OPTIONS)
def ddp(options: str) -> None:
    compare(lambda: DistributedDataParallel(model(), **DDP_OPTIONS[options]))


@case(keeps_divisor=[True, False])
def join(keeps_divisor: bool) -> None:
    """Ranks with different numbers of batches."""

    def run() -> list[Tensor]:
        net = DistributedDataParallel(model())
        optimizer = sgd(net)
        with net.join(divide_by_initial_world_size=keeps_divisor):
            for step in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                net(batch(step)[0]).square().sum().backward()
                optimizer.step()
        return [whole(parameter) for parameter in net.parameters()]

    over_both(run)


@case()
def communication_hooks() -> None:
    def hooked() -> nn.Module:
        net = DistributedDataParallel(model())
        net.register_comm_hook(None, default_hooks.allreduce_hook)
        return net

    compare(hooked)


@case()
def power_sgd() -> None:
    def hooked() -> nn.Module:
        net = DistributedDataParallel(model().float())
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return net.double()

    compare(hooked)


@case()
def zero_redundancy_optimizer() -> None:
    def divided(net: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    compare(lambda: DistributedDataParallel(model()), divided)


@case(least=2)
def a_backward_pass_whose_all_reduce_fails() -> None:
    """DDP's reducer raises the error of the operation, with its text, and the process goes on."""
    with default_group():
        net = DistributedDataParallel(nn.Linear(4, 1))
        net(torch.ones(2, 4)).sum().backward()
        loss = net(torch.ones(2, 4)).sum()  # DDP exchanges the order of its buckets here
        if dist.get_rank():
            with pytest.raises(RuntimeError, match=r"MismatchError: ranks disagree .* has the kind barrier"):
                loss.backward()
        else:
            with pytest.raises(MismatchError):
                dist.barrier()


@case()
def ranks_have_equal_parameters() -> None:
    with default_group():
        torch.manual_seed(dist.get_rank())
        net = DistributedDataParallel(nn.Linear(4, 4))
        gathered = [torch.zeros(4, 4) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, net.module.weight.detach())
        for one in gathered:
            same(one, gathered[0])
