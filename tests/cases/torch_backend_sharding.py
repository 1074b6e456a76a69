"""Models that are divided among the ranks with torch's own means, over the backend and over gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cases import case
from cases.torch_backend_groups import default_group, in_group, same

STEPS = 4


def model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 8, generator=generator).double(), torch.randn(8, 4, generator=generator).double()


def over_both(train: Callable[[], list[Tensor]]) -> None:
    """Compares the results of a training over sirtaki with those over gloo."""
    results: list[list[Tensor]] = []
    for backend in ("sirtaki", "gloo"):
        with default_group(backend):
            results.append(train())
    assert results[0]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def train(
    net: nn.Module,
    data: Callable[[int], tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Tensor]:
    """Returns the losses of some steps."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, targets = data(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def whole(tensor: Any) -> Tensor:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


@case(reshards=[True, False])
def fully_sharded(reshards: bool) -> None:
    def run() -> list[Tensor]:
        net = model()
        for layer in (net[0], net[2], net):
            fully_shard(layer, reshard_after_forward=reshards)
        losses = train(net, lambda step: batch(step, dist.get_rank()))
        return [*losses, *(whole(parameter) for parameter in net.parameters())]

    over_both(run)


@case()
def tensor_parallel() -> None:
    def run() -> list[Tensor]:
        net = model()[:3]
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(8, 8, generator=generator).double()
        targets = torch.randn(8, 16, generator=generator).double()
        losses = train(net, lambda _: (inputs, targets))
        return [*losses, *(whole(parameter) for parameter in net.parameters())]

    over_both(run)


@case()
def distributed_tensors() -> None:
    with default_group():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        rows = torch.arange(4.0 * dist.get_world_size() * 3).reshape(-1, 3)
        sharded = distribute_tensor(rows, mesh, [Shard(0)])
        same(sharded.full_tensor(), rows)
        same((sharded * 2).redistribute(mesh, [Shard(1)]).full_tensor(), rows * 2)
        assert sharded.sum().full_tensor().item() == rows.sum().item()


@case(least=2, schedule=["1F1B", "GPipe"])
def pipeline(schedule: str) -> None:
    def run() -> list[Tensor]:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(size)]
        stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
        kind = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[schedule]
        runner = kind(stage, n_microbatches=2 * size, loss_fn=nn.functional.mse_loss)
        generator = torch.Generator().manual_seed(5)
        inputs, targets = (torch.randn(4 * size, 8, generator=generator).double() for _ in range(2))
        losses: list[Tensor] = []
        for _ in range(STEPS):
            if rank == 0:
                runner.step(inputs)
            elif rank == size - 1:
                runner.step(target=targets, losses=losses)
            else:
                runner.step()
        gradients = [
            parameter.grad.clone() for parameter in layers[rank].parameters() if parameter.grad is not None
        ]
        assert len(gradients) == 2
        return [*gradients, *(loss.detach() for loss in losses)]

    over_both(run)


@case()
@in_group
def an_asynchronous_checkpoint() -> None:
    """torch asks the group for its devices before it saves in the background."""
    assert torch.device("cpu") in dist.group.WORLD._device_types
    saved = {"weights": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(3)}
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, 0)
        checkpoint.async_save(saved, checkpoint_id=shared[0]).result(timeout=60)
        loaded = {name: torch.zeros_like(value) for name, value in saved.items()}
        checkpoint.load(loaded, checkpoint_id=shared[0])
        dist.barrier()  # rank 0's folder is removed after all have read it
    for name, value in saved.items():
        same(loaded[name], value)
