"""A rank of benchmarks/compression_step.py: training steps with each compression of gradients.

Usage: python -m workers.compression_step SOCKET
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from common.measure import timed
from common.models import Step, large_linear, transformer
from common.serving import serve
from torch import nn

import sirtaki.torch as hvd

MODELS: dict[str, Callable[[], Step]] = {"linear": large_linear, "transformer": transformer}
COMPRESSIONS: dict[str, Callable[[], Any] | None] = {
    "alone": None,  # no exchange
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "powersgd(1)": lambda: hvd.Compression.powersgd(1, start=0),
    "powersgd(4)": lambda: hvd.Compression.powersgd(4, start=0),
    "topk(0.01)": lambda: hvd.Compression.topk(0.01, start=0),
    "onebit": lambda: hvd.Compression.onebit(start=0),
    "int8": lambda: hvd.Compression.int8(),
    "fp8": lambda: hvd.Compression.fp8(),
}
LEAST_WARM_UP = 2  # steps: the first one is exact


class Rank:
    """The orders that a rank executes."""

    def __init__(self) -> None:
        self._step: Callable[[], None] | None = None
        self._model: nn.Module = nn.Module()
        self._optimizer: Any = None

    def versions(self) -> dict[str, str]:
        """Returns the versions of what is measured."""
        return {"torch": torch.__version__}

    def choices(self) -> dict[str, list[str]]:
        """Returns the models and compressions that `prepare` takes."""
        return {"models": list(MODELS), "compressions": list(COMPRESSIONS)}

    def prepare(self, model: str, compression: str) -> dict[str, Any]:
        """Makes a model and its optimizer; returns the size of the model."""
        self._step = self._optimizer = None  # the last one's optimizer releases its parameters
        torch.manual_seed(0)
        step = MODELS[model]()
        self._model = step.make_model()
        plain = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        make = COMPRESSIONS[compression]
        self._optimizer = hvd.DistributedOptimizer(plain, compression=make()) if make else plain
        self._step = lambda: step.train(self._model, self._optimizer)
        return {"parameters": sum(one.numel() for one in self._model.parameters())}

    def steps(self, calls: int) -> dict[str, Any]:
        """Returns the duration of each step in microseconds, and the bytes that one has sent."""
        assert self._step is not None
        timed(self._step, LEAST_WARM_UP)
        before = hvd.stats()["compression"]
        times = timed(self._step, calls)
        after = hvd.stats()["compression"]
        sent, exact = ((after[key] - before[key]) / calls for key in ("sent_bytes", "exact_bytes"))
        return {"times": times, "sent": sent, "exact": exact, "error": after["relative_error"]}


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    gc.disable()
    serve(sys.argv[1], hvd.rank(), Rank())
    hvd.shutdown()


if __name__ == "__main__":
    main()
