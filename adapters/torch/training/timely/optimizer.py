"""A mixin for optimizers with steps that do not wait for ranks that are late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from sirtaki.torch.training.loss_scale import unscaling_scaler
from sirtaki.torch.training.reducer import GradientReducer
from sirtaki.torch.training.timely.exchange import TimelyGradients
from sirtaki.torch.training.wrapping import Wrapped, closure_of


class Timely(Wrapped):
    """An optimizer that keeps gradients on this rank until `step()`, or `synchronize()` before it."""

    _technique = "DistributedOptimizer(…, deadline=…)"
    _reducer: GradientReducer
    _settings: Any

    @property
    def _gradients(self) -> TimelyGradients:
        gradients = self._reducer.stage(TimelyGradients)
        assert gradients is not None
        return gradients

    @property
    def contributors(self) -> Sequence[int]:
        """The ranks that contributed gradients to the last step: the same on all ranks, ascending."""
        return self._gradients.contributors

    @property
    def is_late(self) -> bool:
        """Whether the last step was taken without this rank's gradients.

        A rank catches up sooner if it leaves out the next batch then: its `step()` without a backward pass
        contributes what it has yet to contribute.
        """
        return self._gradients.is_late

    def flush(self) -> bool:
        """Takes a last step with the gradients that late ranks have yet to contribute.

        All ranks must call it, at the end of training, or before a checkpoint: it waits for all. Gradients
        that have not been used are lost.

        Returns:
            Whether there were any, and a step was taken; the same on all ranks.
        """
        self._scope.check_world()
        if not self._gradients.flush():
            return False
        with self._settings.skips:
            self.step()
        self.zero_grad()
        return True

    def _before_own_step(self, args: Any, kwargs: Any) -> Any:
        if closure_of(args, kwargs) is not None:
            raise ValueError("a step with a deadline takes no closure: call backward() before step()")
        if not self._has_common_gradients:
            self._gradients.remove_scale()  # no scaler has unscaled the gradients of this step
        return super()._before_own_step(args, kwargs)

    # ---- Loss scaling: the gradients that a scaler unscales are those of all ranks ---------------------

    @property
    def _has_common_gradients(self) -> bool:
        """Whether `step()` uses the gradients as they are."""
        return self._reducer.is_idle or self._reducer.is_reduced or self._settings.skips.depth > 0

    @property
    def param_groups(self) -> Any:
        """The optimizer's groups. A GradScaler reads them when it unscales gradients, which is noticed here.

        Only the rank with an overflow would skip the step if it unscaled the gradients of this rank, and the
        others would apply it.

        Raises:
            ValueError: to the scaler, if the gradients of this step are still this rank's own.
        """
        if (scaler := unscaling_scaler()) is not None:
            if not self._has_common_gradients:
                raise ValueError(
                    "with a deadline, a GradScaler has to unscale the gradients of all ranks, so that all "
                    "skip the same steps: call optimizer.synchronize() after backward(), and "
                    "scaler.unscale_(optimizer), clipping and scaler.step(optimizer) after it"
                )
            self._gradients.scale.note(scaler)
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["param_groups"] = groups

    # A step is decided as a whole, so other parameters are refused.
    _follow_groups = Wrapped._refuse_other_parameters
    add_param_group = Wrapped.add_param_group


def refuse_parameters_with_deadline(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for parameters whose gradients cannot be one tensor in the memory of the CPU."""
    parameters = dict(named)
    if not parameters:
        raise ValueError("a deadline needs an optimizer with parameters")
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu":
            raise ValueError(f"parameter {name!r} is on {parameter.device}, and deadlines are for the CPU")
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) > 1:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            "a deadline needs parameters of one dtype, because a step is decided as a whole; these have "
            f"{found}"
        )
