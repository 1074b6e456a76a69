"""A rank of the memory measurement: trains first alone, then with sirtaki, and reports its peak's growth."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import sirtaki.torch as hvd

LAYERS, WIDTH = 6, 2048
STEPS = 5


def resident(field: str) -> int:
    """Reads a line of /proc/self/status, in bytes: VmHWM is the peak, RssShmem the current shared part."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = torch.randn(16, WIDTH)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def measure() -> dict[str, int]:
    """Returns, in bytes: the gradients, the growth of the peak, and the shared segment's part of it."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer)
    optimizer.zero_grad()
    before, shared_before = resident("VmHWM"), resident("RssShmem")
    hvd.init()
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, distributed)
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    shared = resident("RssShmem") - shared_before
    return {"gradients": gradients, "growth": resident("VmHWM") - before, "shared": shared}


class MemoryRank:
    """Measures at once."""

    def __init__(self, _: Path) -> None:
        torch.set_num_threads(1)
        self._result = measure()
        self.number = hvd.rank()

    def result(self) -> dict[str, int]:
        return self._result
