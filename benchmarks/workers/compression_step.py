"""A rank of benchmarks/compression_step.py: training steps with each compression of gradients.

Usage: python -m workers.compression_step SOCKET
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from common.models import large_linear, transformer
from common.serving import serve_alone
from common.step_rank import MakeOptimizer, StepRank
from torch import nn

import sirtaki.torch as hvd

MODELS = {"linear": large_linear, "transformer": transformer}
COMPRESSIONS = {
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "powersgd(1)": lambda: hvd.Compression.powersgd(1, start=0),
    "powersgd(4)": lambda: hvd.Compression.powersgd(4, start=0),
    "topk(0.01)": lambda: hvd.Compression.topk(0.01, start=0),
    "onebit": lambda: hvd.Compression.onebit(start=0),
    "int8": lambda: hvd.Compression.int8(),
    "fp8": lambda: hvd.Compression.fp8(),
}
WARM_UP = 2  # steps: the first one is exact


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def compressed(name: str, model: nn.Module) -> Any:
    return hvd.DistributedOptimizer(plain(model), compression=COMPRESSIONS[name]())


WAYS: dict[str, MakeOptimizer] = {
    "alone": plain,  # no exchange
    **{name: partial(compressed, name) for name in COMPRESSIONS},
}


class Rank(StepRank):
    """The orders that a rank executes."""

    def __init__(self) -> None:
        super().__init__(MODELS, WAYS, WARM_UP)

    def steps(self, calls: int) -> dict[str, Any]:
        """Works like `StepRank.steps`, and returns the bytes that a step has sent, too."""
        before = hvd.stats()["compression"]
        answer = super().steps(calls)
        after = hvd.stats()["compression"]
        sent, exact = ((after[key] - before[key]) / calls for key in ("sent_bytes", "exact_bytes"))
        return {**answer, "sent": sent, "exact": exact, "error": after["relative_error"]}


if __name__ == "__main__":
    serve_alone(Rank())
