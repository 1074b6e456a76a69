"""An optimizer with steps that do not wait for ranks that are late.

The gradients of a step are concatenated and reduced in a single all-reduce with a deadline. All ranks apply
the result of every round, in order, so their parameters stay equal; the ranks that contribute are the same
for all parameters. (Eager-SGD: Li et al., arXiv 1908.04207.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.common.ops.deadlines import Deadline
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.ops.reduction import gradient_reduction
from sirtaki.common.training.shares import current_share
from sirtaki.torch.consistency import check_parameters
from sirtaki.torch.ops.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.training.loss_scale import ResidualScale, unscaling_scaler
from sirtaki.torch.training.parameters import all_named, filled
from sirtaki.torch.training.reducer import Nesting
from sirtaki.torch.training.wrapping import Optimizer, Wrapped, closure_of, wrap


@dataclass(frozen=True)
class LateRule:
    """When a step is taken without ranks that are late, and what becomes of their gradients.

    Attributes:
        deadline: when a round is decided.
        late: "accumulate" adds them to the rank's next contribution, "drop" discards them.
    """

    deadline: Deadline
    late: str

    def __post_init__(self) -> None:
        if self.late not in ("accumulate", "drop"):
            raise ValueError(f"late is {self.late!r}, but it has to be 'accumulate' or 'drop'")


class DeadlineRounds:
    """The rounds of an optimizer's gradients on this rank.

    Attributes:
        contributors: the ranks whose gradients are in the result of the last round.
    """

    def __init__(self, scope: CollectiveScope, rule: LateRule, op: int, named: dict[str, Tensor]) -> None:
        self.scope = scope
        self.contributors: Sequence[int] = scope.ranks
        self._rule, self._op, self._how = rule, op, gradient_reduction(op, 1.0)
        self._named = named
        self._parameters = list(named.values())
        self._residual: Tensor | None = None  # what this rank has yet to contribute
        self._scale = ResidualScale()
        self._is_checked = False

    @property
    def is_late(self) -> bool:
        """Returns whether the last round was decided without this rank."""
        return self.scope.context.rank not in self.contributors

    def exchange(self) -> None:
        """Replaces the gradients by the result of a round. All ranks must call it."""
        _refuse_share()
        if self.scope.has_no_peers:
            return
        self._check_parameters()
        own = self._contribution()
        options = self.scope.options(self._how)
        with self.scope.context.steps.exposed:
            result, self.contributors = COLLECTIVES.run_with_deadline(own, options, self._rule.deadline)
        keeps = self.is_late and self._rule.late == "accumulate"
        self._residual = own if keeps else None
        self._scale.follow()
        self._distribute(result)

    def exchange_residuals(self) -> bool:
        """Replaces the gradients by what ranks have yet to contribute; returns whether there is anything."""
        if self.scope.has_no_peers:
            return False
        self.remove_scale()
        own = self._residual
        self._residual, self.contributors = None, self.scope.ranks
        if own is None:
            own = torch.zeros(self._elements, dtype=self._parameters[0].dtype)
        self._distribute(COLLECTIVES.allreduce_(own, None, f"{self.scope.name}.rest", self._op))
        return any(parameter.grad is not None for parameter in self._parameters)

    def note_scaler(self, scaler: Any) -> None:
        """Records the GradScaler, and its current scale as the scale of the residual."""
        self._scale.note(scaler)

    def remove_scale(self) -> None:
        """Takes the loss scale away from the residual. One that has overflowed is dropped, as by a scaler."""
        if self._residual is not None and self._scale.value is not None:
            is_finite = bool(self._residual.isfinite().all())
            self._residual = self._rescaled(self._scale.to_unscaled()) if is_finite else None
        self._scale.note(None)

    def _rescaled(self, factor: float) -> Tensor:
        """Multiplies the residual, in place, without the counts behind it."""
        assert self._residual is not None
        if factor != 1.0:
            self._residual[: -len(self._parameters)].mul_(factor)
        return self._residual

    @property
    def _elements(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters) + len(self._parameters)

    def _check_parameters(self) -> None:
        """Makes sure, before the first round, that all ranks begin with the same parameters."""
        if self._is_checked:
            return
        self._is_checked = True
        if self.scope.context.setting("check_parameters") != "0":
            check_parameters(self._named.items())

    def _contribution(self) -> Tensor:
        """Returns the concatenated gradients, followed by a presence flag for each parameter: 1 or 0.

        The flags' sums tell which parameters have no gradient on any contributor.
        """
        parts = [_gradient_of(name, parameter) for name, parameter in self._named.items()]
        present = torch.tensor([part is not None for part in parts], dtype=self._parameters[0].dtype)
        own = torch.cat([*(part.reshape(-1) for part in filled(parts, self._parameters)), present])
        return own if self._residual is None else own.add_(self._rescaled(self._scale.to_present()))

    def _distribute(self, result: Tensor) -> None:
        sizes = [parameter.numel() for parameter in self._parameters]
        *rows, present = result.split([*sizes, len(sizes)])
        for parameter, row, is_present in zip(self._parameters, rows, present.tolist(), strict=True):
            if not is_present:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = row.view_as(parameter).clone()
            else:
                parameter.grad.copy_(row.view_as(parameter))


def _gradient_of(name: str, parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        raise ValueError(f"the gradient of {name!r} is sparse, and deadlines are for dense gradients")
    return None if gradient is None else gradient.detach()


class DeadlineOptimizer(Wrapped):
    """The abilities of such an optimizer besides its own class. Hooks surround its own step."""

    _technique = "DistributedOptimizer(…, deadline=…)"
    _rounds: DeadlineRounds
    _skips: Nesting
    _is_exchanged: bool

    @property
    def _scope(self) -> CollectiveScope:
        return self._rounds.scope

    @property
    def param_groups(self) -> Any:
        """The optimizer's groups. A GradScaler reads them when it unscales gradients, which is noticed here.

        Raises:
            ValueError: to the scaler, if the gradients of this step are still this rank's own.
        """
        scaler = unscaling_scaler()
        if scaler is not None:
            self._check_order()
            self._rounds.note_scaler(scaler)
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.__dict__["param_groups"] = groups

    def _check_order(self) -> None:
        """Raises ValueError if the gradients are unscaled before their exchange.

        Only the rank with an overflow would skip the step, and the others would apply it.
        """
        if not (self._is_exchanged or self._skips.depth or self._scope.has_no_peers):
            raise ValueError(
                "with a deadline, a GradScaler has to unscale the gradients of all ranks, so that all "
                "skip the same steps: call optimizer.synchronize() after backward(), and "
                "scaler.unscale_(optimizer), clipping and scaler.step(optimizer) after it"
            )

    @property
    def contributors(self) -> Sequence[int]:
        """The ranks that contributed gradients to the last step: the same on all ranks, ascending."""
        return self._rounds.contributors

    @property
    def is_late(self) -> bool:
        """Whether the last step was taken without this rank's gradients.

        A rank catches up sooner if it leaves out the next batch then: its `step()` without a backward pass
        contributes what it has yet to contribute.
        """
        return self._rounds.is_late

    def _before_own_step(self, args: Any, kwargs: Any) -> None:
        if closure_of(args, kwargs) is not None:
            raise ValueError("a step with a deadline takes no closure: call backward() before step()")
        if not self._is_exchanged and not self._skips.depth:
            self._rounds.remove_scale()  # no scaler has unscaled the gradients of this step
            self._exchange()

    def _after_own_step(self, args: Any, kwargs: Any) -> None:
        self._is_exchanged = False

    def synchronize(self) -> None:
        """Replaces the gradients by the result of this step's round, for changes of them before `step()`."""
        self._exchange()
        self._is_exchanged = True

    def _exchange(self) -> None:
        self._scope.check_world()
        self._refuse_other_parameters()
        self._rounds.exchange()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Makes a step() inside use the gradients as they are."""
        return self._skips

    def flush(self) -> bool:
        """Takes a last step with the gradients that late ranks have yet to contribute.

        All ranks must call it, at the end of training, or before a checkpoint: it waits for all. Gradients
        that have not been used are lost.

        Returns:
            Whether there were any, and a step was taken; the same on all ranks.
        """
        self._scope.check_world()
        if not self._rounds.exchange_residuals():
            return False
        with self._skips:
            self.step()
        self.zero_grad()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Works like the optimizer's own; the next step needs a round of its own."""
        self._is_exchanged = False
        super().zero_grad(set_to_none)


def with_deadline(
    optimizer: Optimizer, names: dict[Tensor, str], context: Context, rule: LateRule, op: int
) -> Any:
    """Makes the optimizer step without the ranks that are late; `names` are for messages.

    Raises:
        ValueError: deadlines are not available for these parameters, in this job, or for this combination.
    """
    named = dict(all_named(optimizer, names))
    _refuse_share()
    _refuse_parameters(named)
    scope = CollectiveScope.numbered(context, "step", global_process_set)
    wrapped = wrap(optimizer, DeadlineOptimizer)
    wrapped._rounds = DeadlineRounds(scope, rule, op, named)
    wrapped._skips, wrapped._is_exchanged = Nesting(), False
    context.steps.may_be_late = True
    return wrapped


def _refuse_share() -> None:
    """Raises ValueError while a batch is split over the ranks, as its result must equal a single device's."""
    if current_share() is not None:
        raise ValueError(
            "a deadline cannot be combined with one batch that is split over the ranks: its result would "
            "depend on which ranks are late"
        )


def _refuse_parameters(named: dict[str, Tensor]) -> None:
    if not named:
        raise ValueError("a deadline needs an optimizer with parameters")
    for name, parameter in named.items():
        if parameter.device.type != "cpu":
            raise ValueError(f"parameter {name!r} is on {parameter.device}, and deadlines are for the CPU")
    dtypes = {parameter.dtype for parameter in named.values()}
    if len(dtypes) > 1:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            "a deadline needs parameters of one dtype, because a step is decided as a whole; these have "
            f"{found}"
        )
