"""The exchange of an optimizer's gradients without the gradients of late ranks.

The gradients of a step are concatenated and reduced in a single all-reduce with a deadline. All ranks apply
the result of every round, in order, so their parameters stay equal; the ranks that contribute are the same
for all parameters. (Eager-SGD: Li et al., arXiv 1908.04207.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sirtaki.common.ops.handles import Handle, start
from sirtaki.common.ops.requests import ALLREDUCE_IN_PLACE, Decided, with_deadline
from sirtaki.common.training.shares import current_share
from sirtaki.torch.ops.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.training.loss_scale import ResidualScale
from sirtaki.torch.training.parameters import NamedParameter, filled
from sirtaki.torch.training.stage import ExchangeOptions, Stage, StepDeadline


class TimelyGradients(Stage):
    """The exchange of all gradients that a step has, with a deadline. It runs when a round is finished.

    Without peers there are no gradients to exchange.

    Attributes:
        contributors: the ranks whose gradients are in the result of the last round.
        scale: the loss scale of what this rank has yet to contribute.
    """

    def __init__(
        self, deadline: StepDeadline, options: ExchangeOptions, named: Sequence[NamedParameter]
    ) -> None:
        super().__init__(options, named)
        self.contributors: Sequence[int] = self._scope.ranks
        self._deadline = deadline
        self._step = CollectiveScope.numbered(self._context, "step", self._scope.process_set)
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._residual: Tensor | None = None  # what this rank has yet to contribute
        self.scale = ResidualScale()
        self._has_begun = False
        self._sent: tuple[Tensor, Handle[Decided]] | None = None  # this rank's contribution to the round
        self._context.steps.may_be_late = True

    @property
    def is_late(self) -> bool:
        """Returns whether the last round was decided without this rank."""
        return self._context.rank not in self.contributors

    @property
    def is_open(self) -> bool:
        return self._has_begun

    def start(self, indices: list[int], absent: bool) -> list[int]:
        return []

    def start_rest(self) -> None:
        self._has_begun = bool(self._parameters)

    def finish(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        """Replaces the gradients by the result of a round.

        Raises:
            HorovodInternalError: the exchange failed.
            ValueError: a gradient is sparse, or a batch is split over the ranks.
        """
        if self._sent is None:  # else a wait was interrupted, and goes on
            _refuse_share()
            own = self._contribution()
            options = self._step.options(self._how)
            operation = with_deadline(COLLECTIVES.adapter, self._context, own, options, self._deadline)
            self._sent = own, start(self._context, operation)
        own, handle = self._sent
        result, self.contributors = handle.wait()
        self._residual = own if self.is_late and self._deadline.late == "accumulate" else None
        self._distribute(result)
        return []

    def discard(self) -> None:
        self._has_begun, self._sent = False, None

    def flush(self) -> bool:
        """Replaces the gradients by what ranks have yet to contribute; returns whether there is anything."""
        if not self._parameters:
            return False
        self.remove_scale()
        own, self._residual, self.contributors = self._residual, None, self._scope.ranks
        if own is None:
            own = torch.zeros(sum(self._sizes) + len(self._sizes), dtype=self._parameters[0].dtype)
        self._distribute(self._step.derived("rest").run(ALLREDUCE_IN_PLACE, own, self._how))
        return any(parameter.grad is not None for parameter in self._parameters)

    def remove_scale(self) -> None:
        """Removes the loss scale from the residual. A residual that has overflowed is dropped."""
        if self.scale.value is not None and not all(part.isfinite().all() for part in self._kept):
            self._residual = None
        self.scale.remove(self._kept)

    @property
    def _kept(self) -> list[Tensor]:
        """Returns the residual without the flags behind it, if there is any."""
        return [] if self._residual is None else [self._residual[: -len(self._sizes)]]

    def _contribution(self) -> Tensor:
        """Returns the concatenated gradients, followed by a presence flag for each parameter: 1 or 0.

        The flags' sums tell which parameters have no gradient on any contributor.
        """
        parts = [self._gradient(index) for index in range(len(self._parameters))]
        present = torch.tensor([part is not None for part in parts], dtype=self._parameters[0].dtype)
        own = torch.cat([*(part.reshape(-1) for part in filled(parts, self._parameters)), present])
        self.scale.follow(self._kept)
        return own if self._residual is None else own.add_(self._residual)

    def _gradient(self, index: int) -> Tensor | None:
        gradient = self._parameters[index].grad
        if gradient is not None and gradient.layout != torch.strided:
            name = self._names[index].removeprefix(f"{self._scope.name}.")
            raise ValueError(f"the gradient of {name!r} is sparse, and deadlines are for dense gradients")
        return None if gradient is None else gradient.detach()

    def _distribute(self, result: Tensor) -> None:
        *rows, present = result.split([*self._sizes, len(self._sizes)])
        for parameter, row, is_present in zip(self._parameters, rows, present.tolist(), strict=True):
            if not is_present:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = row.view_as(parameter).clone()
            else:
                parameter.grad.copy_(row.view_as(parameter))


def _refuse_share() -> None:
    """Raises ValueError while a batch is split over the ranks, as its result must equal a single device's."""
    if current_share() is not None:
        raise ValueError(
            "a deadline cannot be combined with one batch that is split over the ranks: its result would "
            "depend on which ranks are late"
        )
