"""A rank of benchmarks/autotune.py: training steps while autotune changes settings, and afterwards.

Usage: python -m workers.autotune SOCKET MODEL
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from common import models
from common.measure import timed
from common.serving import serve_alone

import sirtaki.torch as hvd
from sirtaki.bindings.default_context import current
from sirtaki.common.autotune import tuner_of

WARM_UP = 3  # steps of a block that are not measured
STEPS_AT_A_TIME = 50


class Rank:
    """The orders that a rank executes."""

    def __init__(self) -> None:
        self._optimizer: Any = None

    def step(self) -> None:
        """Takes a step of the model, which the first step makes."""
        if self._optimizer is None:
            torch.manual_seed(hvd.rank())  # each rank has a batch of its own
            self._steps = getattr(models, sys.argv[2])()
            self._model = self._steps.make_model()
            hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
            plain = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
            self._optimizer = hvd.DistributedOptimizer(plain, self._model.named_parameters())
        self._steps.train(self._model, self._optimizer)

    def tune(self) -> dict[str, Any]:
        """Takes steps until autotune has ended; returns how many, and the changes that were kept."""
        tuner, steps, is_over = None, 0, False
        while not is_over:
            timed(self.step, STEPS_AT_A_TIME)
            steps += STEPS_AT_A_TIME
            tuner = tuner_of(current())
            is_over = hvd.broadcast_object(tuner is None or tuner.is_over)
        changes = tuner.findings.changes if tuner is not None and tuner.findings is not None else []
        return {"steps": steps, "kept": " ".join(map(str, changes))}

    def block(self, steps: int) -> list[float]:
        """Returns the duration of each step, in microseconds."""
        timed(self.step, WARM_UP)
        return timed(self.step, steps)


if __name__ == "__main__":
    serve_alone(Rank())
