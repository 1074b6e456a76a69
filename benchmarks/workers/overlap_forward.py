"""A rank of benchmarks/overlap_forward.py: training steps with and without overlap_forward.

Usage: python -m workers.overlap_forward SOCKET
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from common.measure import timed
from common.models import Step, deviation, transformer, vgg
from common.serving import serve
from torch import nn

import sirtaki.torch as hvd

MODELS: dict[str, Callable[[], Step]] = {"vgg": vgg, "transformer": transformer}
WAYS: dict[str, dict[str, Any] | None] = {
    "alone": None,  # no exchange
    "synchronous": {},
    "overlap_forward": {"overlap_forward": True},
}
WARM_UP = 4  # steps: the order of use is known in the third


class Rank:
    """The orders that a rank executes."""

    def __init__(self) -> None:
        self._step: Callable[[], None] | None = None
        self._models: dict[str, nn.Module] = {}
        self._optimizer: Any = None

    def versions(self) -> dict[str, str]:
        """Returns the versions of what is measured."""
        return {"torch": torch.__version__}

    def choices(self) -> dict[str, list[str]]:
        """Returns the models and ways that `prepare` takes."""
        return {"models": list(MODELS), "ways": list(WAYS)}

    def prepare(self, model: str, way: str) -> dict[str, Any]:
        """Makes a model and its optimizer; returns the size of the model."""
        self._step = self._optimizer = None  # the last one's optimizer releases its parameters
        torch.manual_seed(0)
        step = MODELS[model]()
        made = self._models[way] = step.make_model()
        plain = torch.optim.SGD(made.parameters(), lr=1e-3, momentum=0.9)
        options = WAYS[way]
        self._optimizer = plain if options is None else hvd.DistributedOptimizer(plain, **options)
        self._step = lambda: step.train(made, self._optimizer)
        return {"parameters": sum(one.numel() for one in made.parameters())}

    def steps(self, calls: int) -> dict[str, Any]:
        """Returns the duration of each step in microseconds."""
        assert self._step is not None
        timed(self._step, WARM_UP)
        times = timed(self._step, calls)
        return {"times": times}

    def deviation(self) -> float:
        """Returns how far the two distributed trainings have come apart: 0 if they have the same bits."""
        return deviation([self._models["synchronous"], self._models["overlap_forward"]])


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    gc.disable()
    serve(sys.argv[1], hvd.rank(), Rank())
    hvd.shutdown()


if __name__ == "__main__":
    main()
