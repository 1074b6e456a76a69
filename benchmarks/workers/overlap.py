"""A rank of the overlap measurement: a backward pass that sleeps, as a pass does while a GPU works.

Usage: python -m workers.overlap SOCKET
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common.measure import median, timed
from common.serving import serve, training_ranks
from torch import Tensor, nn

import sirtaki.torch as hvd

LAYERS = 24
ELEMENTS = 1 << 20  # 4 MiB per layer


class Sleep(torch.autograd.Function):
    """A function that adds a weight; its derivative takes a while, in which the processor is free."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        context.layer = layer
        return x + weight[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = context.layer
        time.sleep(layer.seconds)
        return gradient, layer.gradient.view(-1), None


class Layer(nn.Module):
    """A weight whose gradient always lies in the same memory, so that making a gradient costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))
        self.gradient = torch.zeros(ELEMENTS)
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.weight, self)


class Rank:
    """The orders that a rank executes. Times in milliseconds, as medians."""

    def __init__(self) -> None:
        self._model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self._ddp_model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*(Layer() for _ in range(LAYERS)))
        )
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)
        self._optimizer = hvd.DistributedOptimizer(optimizer, self._model.named_parameters())

    def layers(self) -> int:
        return LAYERS

    def exchange(self, calls: int) -> float:
        """Measures the gradients' exchange alone: a backward pass that does not sleep."""
        self._set_pause(0.0)
        return self._median(self._backward(self._model), calls)

    def compute(self, seconds: float, calls: int) -> float:
        """Measures the backward pass without an exchange of gradients."""
        self._set_pause(seconds)
        backward = self._backward(self._model)

        def alone() -> None:
            with self._optimizer.no_sync():
                backward()

        result = self._median(alone, calls)
        self._optimizer.zero_grad()
        return result

    def step(self, seconds: float, calls: int) -> float:
        """Measures backward pass and exchange together."""
        self._set_pause(seconds)
        return self._median(self._backward(self._model), calls)

    def ddp_step(self, seconds: float, calls: int) -> float:
        """Measures the same with DDP over gloo."""
        self._set_pause(seconds)
        return self._median(self._backward(self._ddp_model), calls)

    def _backward(self, model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            self._optimizer.zero_grad()
            model(torch.zeros(1, requires_grad=True)).sum().backward()

        return run

    def _median(self, call: Callable[[], None], calls: int) -> float:
        hvd.barrier()
        timed(call, 2)
        return median(timed(call, calls)) / 1e3

    def _set_pause(self, seconds: float) -> None:
        for model in (self._model, self._ddp_model):
            for module in model.modules():
                if isinstance(module, Layer):
                    module.seconds = seconds


def main() -> None:
    path = sys.argv[1]
    torch.set_num_threads(1)
    hvd.init()
    with training_ranks("gloo", path):
        serve(path, hvd.rank(), Rank())


if __name__ == "__main__":
    main()
