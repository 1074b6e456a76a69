"""A rank whose training steps are measured, with one way of exchanging gradients after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from common.measure import timed
from common.models import Step

MakeOptimizer = Callable[[nn.Module], Any]


class StepRank:
    """The orders that such a rank executes."""

    def __init__(
        self, models: Mapping[str, Callable[[], Step]], ways: Mapping[str, MakeOptimizer], warm_up: int
    ) -> None:
        """`warm_up` steps come before those that are measured."""
        self._models, self._ways, self._warm_up = models, ways, warm_up
        self._step: Callable[[], None] = lambda: None
        self._optimizer: Any = None

    def versions(self) -> dict[str, str]:
        """Returns the versions of what is measured."""
        return {"torch": torch.__version__}

    def choices(self) -> dict[str, list[str]]:
        """Returns the models and ways that `prepare` takes."""
        return {"models": list(self._models), "ways": list(self._ways)}

    def prepare(self, model: str, way: str) -> None:
        """Makes a model and its optimizer, and takes the steps that are not measured."""
        self._step, self._optimizer = lambda: None, None  # the last one's optimizer releases its parameters
        torch.manual_seed(0)
        step = self._models[model]()
        made = step.make_model()
        self.use(way, made)
        self._optimizer = self._ways[way](made)
        self._step = lambda: step.train(made, self._optimizer)
        timed(self._step, self._warm_up)

    def use(self, way: str, model: nn.Module) -> None:
        """Called with each model before it is trained."""

    def steps(self, calls: int) -> dict[str, Any]:
        """Returns the duration of each step, in microseconds."""
        return {"times": timed(self._step, calls)}
