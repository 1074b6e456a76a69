"""Parameters in flight: from the backward pass that has submitted their gradients until their next use."""

from __future__ import annotations

import copy
import inspect
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common.semantics import hint
from sirtaki.torch._private import has_compiled, without_modes, without_subclasses, without_transforms
from sirtaki.torch.ops.metadata import NEEDS_NO_ELEMENTS
from sirtaki.torch.ops.tensors import count_write
from sirtaki.torch.training.overlapped.exchange import UrgentGradients
from sirtaki.torch.training.parameters import NamedParameter
from sirtaki.torch.training.stage import ExchangeOptions, Stage
from sirtaki.torch.training.wrapping import Optimizer, Wrapped


class Flight(Stage):
    """The parameters of an optimizer with deferred updates, by index among the exchanged parameters.

    The stage submits all gradients; `finish` completes all updates.
    """

    def __init__(self, options: ExchangeOptions, named: Sequence[NamedParameter]) -> None:
        super().__init__(options, named)
        self._gradients = UrgentGradients(options, named)
        self._lock = threading.RLock()
        self._update: DeferredUpdate | None = None
        self._values: dict[int, Tensor] = {}  # of parameters that show NaN until they are updated
        self._failure: str | None = None
        self._has_hinted = False
        _flights.add(self)

    @property
    def is_open(self) -> bool:
        return bool(self._gradients.in_flight)

    @property
    def has_update(self) -> bool:
        """Returns whether parameters are in flight that are updated when they land."""
        return self._update is not None and self.is_open

    def start(self, indices: list[int], absent: bool) -> list[int]:
        """Submits all gradients.

        Raises:
            HorovodInternalError: an earlier round has failed.
        """
        if indices and self._failure is not None:
            raise HorovodInternalError(
                f"an earlier step has failed while it was exchanged ({self._failure}), so some ranks may "
                "have updated parameters that others have not: load a checkpoint, broadcast it, and make a "
                "new optimizer"
            )
        self._gradients.start(indices, absent)
        return []

    @property
    def may_take_off(self) -> bool:
        """Returns whether parameters may be in flight outside of backward passes.

        Compiled code looks at parameters without telling them, and would be compiled again for their class.
        """
        if not has_compiled():
            return True
        if not self._has_hinted:
            self._has_hinted = True
            if self._context.rank == 0:
                hint(
                    "overlap_forward has no effect in a program that uses torch.compile: steps wait for all "
                    "gradients"
                )
        return False

    def take_off(self) -> None:
        """Defers the update of all parameters with submitted gradients until they are used."""
        self._update = None
        WATCH.begin(id(self))
        for number in self._gradients.in_flight:
            take_off(self._parameters[number], self, number)

    def step_ahead(self, optimizer: Wrapped) -> list[list[Tensor]]:
        """Makes parameters in flight be updated when they land, as the optimizer would do it now.

        Returns the other parameters, by group.
        """
        with self._lock, _undisturbed():
            self._update = DeferredUpdate(optimizer)
            for number in self._gradients.in_flight:
                self._hide(number)
            return self._others(optimizer)

    def drop_gradients_later(self, optimizer: Optimizer, set_to_none: bool) -> list[list[Tensor]]:
        """Makes gradients in flight be dropped after the update.

        Returns the other parameters, by group.
        """
        with self._lock, _undisturbed():
            if self._update is not None:
                self._update.drop_gradients(set_to_none)
            return self._others(optimizer)

    def _others(self, optimizer: Optimizer) -> list[list[Tensor]]:
        absent = {id(self._parameters[number]) for number in self._gradients.in_flight}
        return [
            [parameter for parameter in group["params"] if id(parameter) not in absent]
            for group in optimizer.param_groups
        ]

    def _hide(self, number: int) -> None:
        """Replaces the values of a parameter by NaN, for code that does not wait for the update.

        Graphs that were made with the old values become invalid, as by the update itself.
        """
        parameter = self._parameters[number]
        self._values[number] = parameter.data
        parameter.data = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
        count_write([parameter])

    def _show(self, number: int) -> None:
        if number in self._values:
            self._parameters[number].data = self._values.pop(number)

    # ---- Landing ---------------------------------------------------------------------------------------

    def land(self, number: int) -> None:
        """Completes the update of a parameter that is used now, and the updates with completed gradients.

        Raises:
            HorovodInternalError: an exchange failed.
        """
        with self._lock, _undisturbed():
            if number not in self._gradients.in_flight:  # another thread was first
                return
            if self._update is not None:
                self._gradients.note_use(number)
            # While the order of use is observed, each parameter lands when it is used.
            others = self._gradients.arrived(number) if self._gradients.knows_uses else []
            self._land([number, *others])

    def finish(self, reduced: Sequence[Tensor] = ()) -> list[Tensor]:
        """Lets all parameters land."""
        with self._lock, _undisturbed():
            self._land(self._gradients.in_flight)
        return []

    def _land(self, numbers: Sequence[int]) -> None:
        landed: list[int] = []
        try:
            for number in numbers:
                self._gradients.complete(number)
                landed.append(number)
        except KeyboardInterrupt:
            self._put_in_place(landed)
            raise
        except BaseException as error:
            self._fail(error)
            raise
        self._put_in_place(landed)

    def _put_in_place(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._show(number)
        parameters = [self._parameters[number] for number in numbers]
        try:
            if self._update is not None and parameters:
                self._update.apply(parameters)
        except BaseException as error:
            self._fail(error)
            raise
        for parameter in parameters:
            touch_down(parameter)
        if not self.is_open:
            WATCH.end(id(self))

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self.discard()

    def discard(self) -> None:
        """Ends the round. Parameters that are still in flight keep their values: something has failed."""
        if self.is_open and self._failure is None:
            self._failure = "it was given up"
        with self._lock, _undisturbed():
            self._update = None
            self._gradients.discard()
            for number, parameter in enumerate(self._parameters):
                self._show(number)
                touch_down(parameter)
            WATCH.end(id(self))

    def close(self) -> None:
        """Lets parameters that are in flight land: the optimizer is dropped, or its parameters change."""
        if self.is_open:
            with suppress(HorovodInternalError):  # the world has ended
                self.finish()


_flights: weakref.WeakSet[Flight] = weakref.WeakSet()


@contextmanager
def _undisturbed() -> Iterator[Any]:
    """Lets what is done inside be what it would be in `step()`, wherever a parameter is used."""
    autocast = torch.autocast("cpu", enabled=False)
    usual = (without_transforms(), without_modes(), torch.inference_mode(False), autocast, torch.no_grad())
    with ExitStack() as stack:
        for context in (*usual, without_subclasses()):
            stack.enter_context(context)
        yield


def _before_fork() -> None:
    """Lets all parameters land: a forked child has no connection to other ranks."""
    for flight in list(_flights):
        flight.close()


os.register_at_fork(before=_before_fork)


# ---- The calls of modules while parameters are in flight -----------------------------------------------


class _Watch:
    """A hook of all modules, which exists only while a flight is open: it costs each call a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: set[int] = set()
        self._hook: Any = None

    def begin(self, flight: int) -> None:
        """Watches for a flight, given by a number of its own."""
        with self._lock:
            self._flights.add(flight)
            if self._hook is None:
                self._hook = register_module_forward_pre_hook(_land_parameters_of)

    def end(self, flight: int) -> None:
        """Ends the watch for a flight."""
        with self._lock:
            self._flights.discard(flight)
            if self._hook is not None and not self._flights:
                self._hook.remove()
                self._hook = None


WATCH = _Watch()


def _land_parameters_of(module: torch.nn.Module, _: Any) -> None:
    # TorchScript calls the parts of a module without hooks.
    is_whole = isinstance(module, torch.jit.ScriptModule)
    for parameter in module.parameters() if is_whole else module._parameters.values():
        if type(parameter) is ParameterInFlight:
            land(parameter)


# ---- A step of an optimizer that is taken parameter by parameter ---------------------------------------

_KEEP, _TO_NONE, _TO_ZERO = range(3)  # the fate of gradients after their update


class DeferredUpdate:
    """An optimizer step, executed per parameter as the gradients complete.

    It uses the hyper-parameters as of the program's call of `step()`, and the optimizer's own state.
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
            if parameter not in self._groups:
                continue
            if self._fate == _TO_NONE:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# ---- Parameters whose gradients are still being exchanged, while the program goes on -------------------


class ParameterInFlight(torch.nn.Parameter):
    """The class of a parameter while its gradient is exchanged, or its update is due.

    Whatever touches it, in any thread, first waits for its new value: a layer's forward pass, a checkpoint, a
    norm. So a program sees the values that it would see if `step()` had waited. Modules are also noticed as
    they are called, because compiled ones give their parameters to C++ without telling them. Code in C++ that
    gets a parameter in another way finds NaN instead of an old value.

    Attributes:
        landing: its flight; None if the program has made it as an object of this class.
        number: its number there.
    """

    landing: Flight | None = None
    number: int = 0

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in NEEDS_NO_ELEMENTS:
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        found = [*_in_flight(args), *_in_flight((kwargs or {}).values())]
        for parameter in found:
            land(parameter)
        if any(type(parameter) is ParameterInFlight for parameter in found):  # would come back here for ever
            raise RuntimeError("a parameter is used while its own update is being made")
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        land(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        land(self)
        return self.__reduce_ex__(protocol)


def take_off(parameter: Tensor, flight: Flight, number: int) -> None:
    """Begins the flight of a parameter, which its landing ends."""
    parameter.landing, parameter.number = flight, number  # type: ignore[attr-defined]
    parameter.__class__ = ParameterInFlight  # last: another thread may look at it


def touch_down(parameter: Tensor) -> None:
    """Restores the class of a parameter after its deferred update."""
    if type(parameter) is ParameterInFlight:
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]
        for name in ("landing", "number"):
            parameter.__dict__.pop(name, None)


def land(parameter: Tensor) -> None:
    """Completes the deferred update of a parameter, if there is any."""
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
