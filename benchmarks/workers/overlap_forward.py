"""A rank of benchmarks/overlap_forward.py: training steps with and without overlap_forward.

Usage: python -m workers.overlap_forward SOCKET
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common.models import deviation, transformer, vgg, waiting_vgg
from common.serving import serve_alone
from common.step_rank import StepRank
from torch import nn

import sirtaki.torch as hvd


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


MODELS = {"vgg": vgg, "transformer": transformer, "vgg elsewhere": waiting_vgg}
WAYS = {
    "alone": plain,  # no exchange
    "synchronous": lambda model: hvd.DistributedOptimizer(plain(model)),
    "overlap_forward": lambda model: hvd.DistributedOptimizer(plain(model), overlap_forward=True),
}
WARM_UP = 4  # steps: the order of use is known in the third


class Rank(StepRank):
    """The orders that a rank executes."""

    def __init__(self) -> None:
        super().__init__(MODELS, WAYS, WARM_UP)
        self._trained: dict[str, nn.Module] = {}  # the last model of each way
        self._way = ""

    def use(self, way: str, model: nn.Module) -> None:
        """Keeps the model for comparisons."""
        self._way, self._trained[way] = way, model

    def steps(self, calls: int) -> dict[str, Any]:
        """Works like `StepRank.steps`, and compares the parameters with those of the synchronous training.

        The deviation is 0 if they have the same bits. "processor" is the processor time of a step, in
        milliseconds: that of all threads of this process, in the program and in the kernel.
        """
        before = time.process_time()
        answer = super().steps(calls)
        answer["processor"] = (time.process_time() - before) / calls * 1e3
        if self._way == "overlap_forward":
            answer["deviation"] = deviation([self._trained["synchronous"], self._trained[self._way]])
        return answer


if __name__ == "__main__":
    serve_alone(Rank())
