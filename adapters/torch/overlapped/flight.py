"""Parameters in flight: from the backward pass that has submitted their gradients until their next use."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common.hints import hint
from sirtaki.torch._private import has_compiled, without_subclasses
from sirtaki.torch.overlapped.exchange import UrgentGradients
from sirtaki.torch.overlapped.parameter import take_off, touch_down
from sirtaki.torch.wrapping import Optimizer, Wrapped

_KEEP, _TO_NONE, _TO_ZERO = range(3)  # what becomes of gradients after their update


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
        self._gradients = _KEEP
        plain = optimizer._plain_class()
        self._stepper: Any = plain.__new__(plain)
        self._stepper.__dict__.update(optimizer.__dict__)  # among it the state, which both share
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            self._stepper.__dict__[hooks] = OrderedDict()

    def drop_gradients(self, set_to_none: bool) -> None:
        """Lets the gradients be dropped after the update, as `zero_grad` drops them."""
        self._gradients = _TO_NONE if set_to_none else _TO_ZERO

    def apply(self, parameters: Sequence[Tensor]) -> None:
        """Updates these parameters."""
        groups: list[dict[str, Any]] = [{**options, "params": []} for options in self._options]
        for parameter in parameters:
            groups[self._groups[parameter]]["params"].append(parameter)
        self._stepper.param_groups = [group for group in groups if group["params"]]
        with torch.no_grad():
            self._step(self._stepper)
        for parameter in parameters if self._gradients != _KEEP else ():
            if self._gradients == _TO_NONE:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class Flight:
    """The parameters of one optimizer that are in flight, each by its number among those exchanged.

    It is the `SpecialExchange` of all gradients: `finish` lets all parameters land.
    """

    def __init__(self, gradients: UrgentGradients, parameters: Sequence[Tensor]) -> None:
        self._gradients, self._parameters = gradients, list(parameters)
        self._lock = threading.RLock()
        self._update: Update | None = None
        self._failure: str | None = None
        self._has_hinted = False

    @property
    def is_open(self) -> bool:
        """Returns whether a parameter is in flight."""
        return bool(self._gradients.in_flight)

    @property
    def has_update(self) -> bool:
        """Returns whether parameters are in flight that are updated when they land."""
        return self._update is not None and self.is_open

    def start(self, numbers: list[int], absent: bool) -> list[int]:
        """Submits these gradients, as new ones or not. Returns those that it leaves to others: none.

        Raises:
            HorovodInternalError: an earlier round has failed.
        """
        if numbers and self._failure is not None:
            raise HorovodInternalError(
                f"an earlier step has failed while it was exchanged ({self._failure}), so some ranks may "
                "have updated parameters that others have not: load a checkpoint, broadcast it, and make a "
                "new optimizer"
            )
        self._gradients.start(numbers, absent)
        return []

    def start_phases(self) -> None:
        """Does nothing: each gradient is exchanged by itself."""

    @property
    def may_take_off(self) -> bool:
        """Returns whether parameters may be in flight outside of backward passes.

        Compiled code looks at parameters without telling them, and would be compiled again for their class.
        """
        if not has_compiled():
            return True
        if not self._has_hinted:
            self._has_hinted = True
            if self._gradients.is_first_rank:
                hint(
                    "overlap_forward has no effect in a program that uses torch.compile: steps wait for all "
                    "gradients"
                )
        return False

    def take_off(self) -> None:
        """Lets all parameters whose gradients have been submitted take off."""
        self._update = None
        for number in self._gradients.in_flight:
            take_off(self._parameters[number], self, number)

    def update_later(self, optimizer: Wrapped) -> None:
        """Makes parameters in flight be updated when they land, as the optimizer would do it now."""
        self._update = Update(optimizer)

    def drop_gradients_later(self, set_to_none: bool) -> None:
        """Makes gradients in flight be dropped after the update."""
        if self._update is not None:
            self._update.drop_gradients(set_to_none)

    def leave_out(self, optimizer: Optimizer) -> list[list[Tensor]]:
        """Takes parameters in flight out of the optimizer's groups; returns what the groups had."""
        absent = {id(self._parameters[number]) for number in self._gradients.in_flight}
        whole = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if id(one) not in absent]
        return whole

    # ---- Landing ---------------------------------------------------------------------------------------

    def land(self, number: int) -> None:
        """Lets a parameter land that is used now, and with it those whose gradients have arrived.

        Raises:
            HorovodInternalError: an exchange failed.
        """
        with self._lock, without_subclasses():
            if number not in self._gradients.in_flight:  # another thread was first
                return
            if self._update is not None:
                self._gradients.note_use(number)
            self._land([number, *self._arrived(number)])

    def finish(self, exact: Iterable[Tensor]) -> None:
        """Lets all parameters land."""
        with self._lock, without_subclasses():
            self._land(self._gradients.in_flight)

    def _arrived(self, used: int) -> list[int]:
        """Returns the other parameters whose gradients have arrived; none while the order of use counts."""
        if not self._gradients.knows_uses:
            return []
        others = (number for number in self._gradients.in_flight if number != used)
        return [number for number in others if self._gradients.has_arrived(number)]

    def _land(self, numbers: Sequence[int]) -> None:
        landed: list[Tensor] = []
        try:
            for number in numbers:
                self._gradients.complete(number)
                landed.append(self._parameters[number])
        except KeyboardInterrupt:
            self._put_in_place(landed)
            raise
        except BaseException as error:
            self._failure = str(error)
            self.discard()
            raise
        self._put_in_place(landed)

    def _put_in_place(self, parameters: Sequence[Tensor]) -> None:
        if self._update is not None and parameters:
            self._update.apply(parameters)
        for parameter in parameters:
            touch_down(parameter)

    def discard(self) -> None:
        """Ends the round. Parameters that are still in flight keep their values: an exchange has failed."""
        self._update = None
        self._gradients.discard()
        for parameter in self._parameters:
            touch_down(parameter)

    def drop_earlier(self) -> None:
        """Does nothing: earlier rounds leave nothing."""

    def close(self) -> None:
        """Lets parameters that are in flight land: the optimizer is dropped, or its parameters change."""
        if self.is_open:
            with suppress(HorovodInternalError):  # the world has ended
                self.finish(())
