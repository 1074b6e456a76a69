"""Parameters whose gradients are still being exchanged, while the program goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sirtaki.torch._private import without_subclasses
from sirtaki.torch.metadata import NEEDS_NO_ELEMENTS


class Landing(Protocol):
    """The owner of parameters in flight."""

    def land(self, number: int) -> None:
        """Waits until the parameter with this number has its new value, and ends its flight."""


class ParameterInFlight(torch.nn.Parameter):
    """The class of a parameter while its gradient is exchanged, or its update is due.

    Whatever touches it, in any thread, first waits for its new value: a layer's forward pass, a checkpoint, a
    norm. So a program sees the values that it would see if `step()` had waited. Modules are also noticed as
    they are called, because compiled ones give their parameters to C++ without telling them. Code in C++ that
    gets a parameter in another way finds NaN instead of an old value.

    Attributes:
        landing: the owner of its flight; None if the program has made it as an object of this class.
        number: its number there.
    """

    landing: Landing | None = None
    number: int = 0

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in NEEDS_NO_ELEMENTS:
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        found = [*_in_flight(args), *_in_flight((kwargs or {}).values())]
        for one in found:
            land(one)
        if any(type(one) is ParameterInFlight for one in found):  # would come back here for ever
            raise RuntimeError("a parameter is used while its own update is being made")
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        land(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        land(self)
        return self.__reduce_ex__(protocol)


def take_off(parameter: Tensor, landing: Landing, number: int) -> None:
    """Begins the flight of a parameter, which the landing ends."""
    parameter.landing, parameter.number = landing, number  # type: ignore[attr-defined]
    parameter.__class__ = ParameterInFlight  # last: another thread may look at it


def touch_down(parameter: Tensor) -> None:
    """Makes a parameter an ordinary one again."""
    if type(parameter) is ParameterInFlight:
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]
        for name in ("landing", "number"):
            parameter.__dict__.pop(name, None)


def land(parameter: Tensor) -> None:
    """Ends the flight of a parameter, if it still is in one."""
    if type(parameter) is not ParameterInFlight:
        return
    if parameter.landing is None:
        touch_down(parameter)
    else:
        parameter.landing.land(parameter.number)


def _in_flight(values: Any) -> Iterator[ParameterInFlight]:
    """Yields the parameters in flight among arguments of a function of torch."""
    for value in values:
        if type(value) is ParameterInFlight:
            yield value
        elif isinstance(value, list | tuple):
            yield from _in_flight(value)
        elif isinstance(value, dict):
            yield from _in_flight(value.values())
