"""A mixin for optimizers that return from `step()` before gradients are complete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sirtaki.torch.training.overlapped.flight import land
from sirtaki.torch.training.reducer import GradientReducer
from sirtaki.torch.training.sharded.kinds import updates_parameters_alone
from sirtaki.torch.training.wrapping import Optimizer, Wrapped


class Overlapped(Wrapped):
    """An optimizer that updates parameters when the program next uses them, with the gradients of `step()`.

    While it steps, its groups hold only the parameters whose gradients have arrived.
    """

    _reducer: GradientReducer

    def _own_inner_hooks(self) -> tuple[Any, Any]:
        before, _, after = self._hooks
        return before, after

    def _begin_update(self) -> None:
        """Leaves the update of parameters that are in flight to their landing."""
        groups = self._reducer.step_ahead(self)
        if groups is None:
            super()._begin_update()  # type: ignore[misc]  # of the optimizer that exchanges the gradients
        else:
            self._swap_groups(groups)

    def _end_update(self) -> None:
        self._put_parameters_back()

    def synchronize(self) -> None:
        """Waits for the updates that are due; before `step()`, makes sure that the gradients are reduced.

        All ranks must call it.
        """
        self._check_use()
        self._follow_groups()  # type: ignore[attr-defined]
        self._reducer.finish_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Works like the optimizer's own. Gradients with a deferred update are dropped after the update."""
        self._put_parameters_back()
        flight = self._reducer.flight
        if flight is None or not flight.has_update:
            super().zero_grad(set_to_none)
            return
        self._swap_groups(flight.drop_gradients_later(self, set_to_none))
        try:
            self._plain_class().zero_grad(self, set_to_none)
        finally:
            self._put_parameters_back()

    # ---- Calls that need the state of all parameters ---------------------------------------------------

    def finish_updates(self) -> None:
        """Waits for all updates that are due. Exchanges nothing that has not been submitted."""
        self._put_parameters_back()
        self._reducer.finish_flight()

    @property
    def state(self) -> Any:
        """The optimizer's state, after all updates that are due: gradients in flight do not concern it."""
        flight = self._reducer.flight
        if self._program_groups is None and flight is not None and flight.has_update:
            self._reducer.finish_flight()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self._reducer.finish_flight()
        self.__dict__["state"] = value

    def state_dict(self) -> dict[str, Any]:
        """Works like the optimizer's own, after all updates that are due."""
        self.finish_updates()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Works like the optimizer's own, after all updates that are due."""
        self.finish_updates()
        super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles as the plain optimizer, after all updates that are due."""
        self.finish_updates()
        return super().__reduce_ex__(protocol)


# ---- The models that `overlap_forward` is for ----------------------------------------------------------


def refuse_model_with_overlap(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for an optimizer, or parameters, that cannot be updated individually."""
    if not updates_parameters_alone(optimizer):
        raise ValueError(
            "overlap_forward needs an optimizer of torch.optim that is known to update each parameter by "
            f"itself, or one that inherits its step, and not {type(optimizer).__name__}"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("overlap_forward takes its steps later, which differentiable=True cannot follow")
    for name, parameter in named:
        land(parameter)  # an earlier optimizer may still have it in flight
        if not parameter.is_cpu:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, but overlap_forward is available for "
                "parameters in the memory of the CPU only"
            )
        if type(parameter) is not torch.nn.Parameter:
            raise ValueError(
                f"parameter {name!r} is a {type(parameter).__name__}, but overlap_forward needs objects of "
                "torch.nn.Parameter itself"
            )
