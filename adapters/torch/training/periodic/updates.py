"""The rules by which the average of the ranks changes the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sirtaki.torch.training.parameters import kept_gradients, parameters_of


class AverageRule:
    """A rule. It is called on all ranks with the same averages.

    Attributes:
        equalizes: whether the parameters are equal on all ranks after each average.
    """

    equalizes = True

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Prepares for the first step: the parameters are equal on all ranks now."""

    def follow(self, parameters: Sequence[Tensor]) -> bool:
        """Continues from what the program has made of parameters that were equal on all ranks.

        Returns whether it has changed any of them, if the rule has to know.
        """
        return False

    def contributions(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns new tensors, which are averaged instead of the parameters."""
        raise NotImplementedError

    def apply(self, parameters: Sequence[Tensor], averages: Sequence[Tensor] | None, is_last: bool) -> None:
        """Changes the parameters; without averages if no rank has taken a step.

        With `is_last`, no rank continues with values of its own: the parameters become equal on all ranks.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Returns what is equal on all ranks besides the parameters, by names."""
        return {}

    def state_dict(self) -> Any:
        """Returns what a checkpoint needs; None if there is nothing."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Continues from what `state_dict` has returned; None: from the parameters at the next step."""


class ParameterAveraging(AverageRule):
    """Replaces parameters by their average over the ranks (local SGD: Stich, arXiv 1805.09767).

    All of the parameters are averaged, whoever has changed them.
    """

    def contributions(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def apply(self, parameters: Sequence[Tensor], averages: Sequence[Tensor] | None, is_last: bool) -> None:
        for parameter, average in zip(parameters, averages or (), strict=averages is not None):
            parameter.copy_(average)


class OuterStep(AverageRule):
    """Moves a global copy of the parameters by an optimizer, against the average of the ranks' changes.

    Douillard et al., DiLoCo, arXiv 2311.08105; with fragments and overlap: Streaming DiLoCo, arXiv
    2501.18512.
    """

    def __init__(self, outer: torch.optim.Optimizer, alpha: float) -> None:
        self.outer, self._alpha = outer, alpha
        self.equalizes = alpha == 0
        self._parameters = parameters_of(outer)
        self._global: dict[Tensor, Tensor] = {}

    def begin(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if parameter not in self._global:
                self._global[parameter] = parameter.detach().clone()

    def follow(self, parameters: Sequence[Tensor]) -> bool:
        changed = [
            parameter for parameter in parameters if not torch.equal(parameter, self._global[parameter])
        ]
        for tensor in changed:  # loaded or broadcast: no change that the ranks' steps have made
            self._global[tensor].copy_(tensor.detach())
        return bool(changed)

    def contributions(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [self._global[parameter] - parameter.detach() for parameter in parameters]

    @torch.no_grad()
    def apply(self, parameters: Sequence[Tensor], averages: Sequence[Tensor] | None, is_last: bool) -> None:
        own = [parameter.clone() for parameter in parameters] if self._alpha and not is_last else None
        for tensor in parameters:
            tensor.copy_(self._global[tensor])
        if averages is not None:
            with kept_gradients(self._parameters):
                for item in self._parameters:
                    item.grad = None
                for tensor, average in zip(parameters, averages, strict=True):
                    tensor.grad = average
                self.outer.step()
            for tensor in parameters:
                self._global[tensor].copy_(tensor)
        for tensor, local in zip(parameters, own or (), strict=own is not None):
            tensor.lerp_(local, self._alpha)

    def tensors(self) -> dict[str, Tensor]:
        found = {f"global {place}": tensor for place, tensor in enumerate(self._ordered())}
        for place, parameter in enumerate(self._parameters):
            for key, value in self.outer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"outer {place} ({key})"] = value
        return found

    def _ordered(self) -> list[Tensor]:
        return [self._global[parameter] for parameter in self._parameters if parameter in self._global]

    def state_dict(self) -> Any:
        return {"global": self._ordered(), "outer": self.outer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Any) -> None:
        self._global = {}
        if state is None:
            self.outer.state.clear()
            return
        for parameter, value in zip(self._parameters, state["global"], strict=bool(state["global"])):
            self._global[parameter] = value.detach().to(parameter.device, parameter.dtype, copy=True)
        self.outer.load_state_dict(state["outer"])
