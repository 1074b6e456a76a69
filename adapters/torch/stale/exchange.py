"""The exchange of gradients beside the training: updates are made of the gradients at hand on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sirtaki.bindings.request import SUM
from sirtaki.common.handles import run
from sirtaki.common.ops import Reduction
from sirtaki.common.requests import ALLREDUCE_IN_PLACE
from sirtaki.torch.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.stale.clock import GlobalBatchClock
from sirtaki.torch.stale.rounds import Rounds


class Update(NamedTuple):
    """An update of the parameters, equal on all ranks.

    Attributes:
        gradients: for each parameter, the sum of its gradients divided by the number of steps, or by the
            number of ranks if that is larger; None if there was none.
        counts: number of gradients in it, by rank.
    """

    gradients: list[Tensor | None]
    counts: list[int]


class StaleExchange(Rounds):
    """One rank's side of the exchange, from its first step until all ranks have ended.

    The program hands over gradients and applies updates; the thread makes updates of gradients.
    """

    def __init__(self, scope: CollectiveScope, parameters: Sequence[Tensor], clock: GlobalBatchClock) -> None:
        super().__init__(scope, clock)
        self._batches = clock
        self._sum = GradientSum(parameters)
        self._included = 0  # this rank's gradients in applied updates
        self._updates: deque[Update] = deque()
        self.start()

    def hand_over(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds the gradients of a step to those that wait for an update."""
        with self._changed:
            self._sum.add(gradients)
            self._contribute()

    def next_update(self) -> Update | None:
        """Returns the next update; None if the caller may compute again, with the updates that it has.

        Waits while more than `staleness` of this rank's gradients are in no update.

        Raises:
            DeadlineError: a rank has computed nothing for too long.
            HorovodInternalError: an exchange failed.
        """
        return self._next(lambda: self._contributed - self._included <= self._clock.staleness)

    def last_updates(self) -> Update | None:
        """Returns the next update; None if all ranks have ended and nothing is left."""
        self.end()
        return self._next(lambda: not self._is_running and self._failure is None)

    def applied(self, update: Update, options: int) -> None:
        """Notes that an update was applied; `options` is a checksum that is equal on all ranks."""
        with self._changed:
            self._included += update.counts[self._place]
            self._applied += 1
            self._options = options
            self._has_news |= self._has_ended

    def _next(self, may_go_on: Callable[[], bool]) -> Update | None:
        with self._changed:
            self._wait(lambda: bool(self._updates) or (self._failure is None and may_go_on()))
            if self._updates:
                return self._updates.popleft()
            self._compute_on()
            return None

    def _update(self) -> None:
        """Makes an update of all gradients at hand."""
        with self._changed:
            own = self._sum.take()
        size = len(self._scope.ranks)
        header = torch.zeros(size + len(own.is_present), dtype=torch.int64)
        header[self._place] = own.steps
        header[size:] = torch.tensor(own.is_present, dtype=torch.int64)
        options = self._scope.derived("update").options(Reduction(SUM))
        context = self._scope.context
        parts = [header, *own.tensors]
        summed, *sums = run(context, COLLECTIVES.group(context, ALLREDUCE_IN_PLACE, parts, options))
        counts, present = summed[:size].tolist(), summed[size:].tolist()
        total = sum(counts)
        divisor = max(total, size)  # when ranks have ended, a gradient does not weigh more
        gradients = [
            one.div_(divisor) if is_present else None for one, is_present in zip(sums, present, strict=True)
        ]
        with self._changed:
            self._batches.count(total)
            self._updates.append(Update(gradients, counts))
            self._changed.notify_all()


# ---- The sum of gradients that wait for an update ------------------------------------------------------


class Contribution(NamedTuple):
    """The part of one rank in an update.

    Attributes:
        tensors: the sum of its gradients for each parameter, zeros if there was none.
        is_present: whether there was one, for each parameter.
        steps: number of steps in the sums.
    """

    tensors: list[Tensor]
    is_present: list[bool]
    steps: int


class GradientSum:
    """Sums of gradients, in memory of their own."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [parameter.detach() for parameter in parameters]
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self._count = 0

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds the gradients of a step."""
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            known = self._sums[place]
            if known is None:
                self._sums[place] = gradient.detach().clone(memory_format=torch.contiguous_format)
            else:
                known.add_(gradient.detach())
        self._count += 1

    def take(self) -> Contribution:
        """Returns the sums, and begins again with none."""
        tensors = [
            torch.zeros_like(parameter, memory_format=torch.contiguous_format) if one is None else one
            for one, parameter in zip(self._sums, self._parameters, strict=True)
        ]
        taken = Contribution(tensors, [one is not None for one in self._sums], self._count)
        self._sums, self._count = [None] * len(self._parameters), 0
        return taken
