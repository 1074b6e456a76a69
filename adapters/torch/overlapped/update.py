"""A step of an optimizer that is taken parameter by parameter."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sirtaki.torch.wrapping import Wrapped

_KEEP, _TO_NONE, _TO_ZERO = range(3)  # the fate of gradients after their update


class Update:
    """A step of an optimizer whose parts are taken as the gradients arrive.

    It uses the hyper-parameters of the moment at which the program has called `step()`, and the optimizer's
    own state.
    """

    def __init__(self, optimizer: Wrapped) -> None:
        self._step: Any = inspect.unwrap(optimizer._plain_class().step)  # without the hooks around it
        self._options = [
            {name: _kept(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._groups = {
            parameter: index
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._fate = _KEEP
        plain = optimizer._plain_class()
        self._stepper: Any = plain.__new__(plain)
        self._stepper.__dict__.update(optimizer.__dict__)  # among it the state, which both share
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            self._stepper.__dict__[hooks] = OrderedDict()

    def drop_gradients(self, set_to_none: bool) -> None:
        """Lets the gradients be dropped after the update, as `zero_grad` drops them."""
        self._fate = _TO_NONE if set_to_none else _TO_ZERO

    def apply(self, parameters: Sequence[Tensor]) -> None:
        """Updates these parameters."""
        groups: list[dict[str, Any]] = [{**options, "params": []} for options in self._options]
        for parameter in parameters:
            if (index := self._groups.get(parameter)) is not None:  # else the program has taken it out
                groups[index]["params"].append(parameter)
        self._stepper.param_groups = [group for group in groups if group["params"]]
        with torch.no_grad():
            self._step(self._stepper)
        for parameter in parameters if self._fate != _KEEP else ():
            if self._fate == _TO_NONE:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
