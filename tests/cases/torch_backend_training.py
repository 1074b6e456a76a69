"""Training over the backend with torch's own means, against the same training over gloo."""

from __future__ import annotations

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
from sirtaki.common.exceptions import MismatchError

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(5, 6, generator=generator).double(), torch.randn(5, 3, generator=generator).double()


def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the losses of some steps, and the parameters after them."""
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach().clone() for parameter in net.parameters())]


def over(backend: str, **options: Any) -> list[Tensor]:
    with default_group(backend):
        net = DistributedDataParallel(model(), **options)
        return trained(net, torch.optim.SGD(net.parameters(), lr=0.1))


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@case()
def ddp() -> None:
    close(over("sirtaki"), over("gloo"))


@case()
def ddp_with_small_buckets() -> None:
    options = {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True}
    close(over("sirtaki", **options), over("gloo", **options))


@case()
def ddp_with_unused_parameters() -> None:
    close(over("sirtaki", find_unused_parameters=True), over("gloo", find_unused_parameters=True))


@case(keeps_divisor=[True, False])
def join(keeps_divisor: bool) -> None:
    """Ranks with different numbers of batches."""
    results = []
    for backend in ("sirtaki", "gloo"):
        with default_group(backend):
            net = DistributedDataParallel(model())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            with net.join(divide_by_initial_world_size=keeps_divisor):
                for step in range(2 + dist.get_rank()):
                    optimizer.zero_grad()
                    net(batch(step)[0]).square().sum().backward()
                    optimizer.step()
            results.append([parameter.detach().clone() for parameter in net.parameters()])
    close(*results)


@case()
def communication_hooks() -> None:
    results = []
    for backend in ("sirtaki", "gloo"):
        with default_group(backend):
            net = DistributedDataParallel(model())
            net.register_comm_hook(None, default_hooks.allreduce_hook)
            results.append(trained(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    close(*results)


@case()
def power_sgd() -> None:
    results = []
    for backend in ("sirtaki", "gloo"):
        with default_group(backend):
            net = DistributedDataParallel(model().float())
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
            )
            net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            net.double()
            results.append(trained(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    close(*results)


@case()
def zero_redundancy_optimizer() -> None:
    results = []
    for backend in ("sirtaki", "gloo"):
        with default_group(backend):
            net = DistributedDataParallel(model())
            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
            results.append(trained(net, optimizer))
    close(*results)


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
