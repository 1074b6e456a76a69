"""The rounds in which threads of all ranks meet beside the training, and the waits of the program for them.

In each round, the threads exchange a report per rank, from which all of them come to the same decision:
whether the gradients at hand become an update. So a rank takes part in updates while its program computes,
and updates are made on all ranks in the same order.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from sirtaki.bindings.errors import DeadlineError, ParametersDifferError
from sirtaki.common.ops.requests import ALLGATHER, ALLREDUCE_IN_PLACE
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.training.parameters import filled


class ClockReport(NamedTuple):
    """The state of a rank, which all ranks receive in the same round.

    Attributes:
        contributed: number of gradients that it has handed over.
        base: number of updates in the parameters with which it computes now; the number of all updates if
            it computes nothing.
        is_computing: whether it is between two steps, not inside one.
        has_ended: whether it has no steps left.
        applied: number of updates that it has applied.
        options: a checksum of the hyper-parameters of these updates.
    """

    contributed: int
    base: int
    is_computing: bool
    has_ended: bool
    applied: int
    options: int


class Decision(Enum):
    """The next act of all ranks."""

    WAIT = 0
    UPDATE = 1
    END = 2


class Clock(ABC):
    """Counts updates, and decides when the next update is made. It is equal on all ranks."""

    def __init__(self, staleness: int, updates: int = 0) -> None:
        self.staleness, self.updates = staleness, updates

    @abstractmethod
    def decide(self, reports: Sequence[ClockReport]) -> Decision:
        """Returns the next act, given the report of each rank."""

    @abstractmethod
    def waits_for(self, reports: Sequence[ClockReport]) -> list[int]:
        """Returns the ranks that have yet to contribute a gradient to the next update."""


class GlobalBatchClock(Clock):
    """A clock with updates of at least as many gradients as there are ranks.

    It does not matter which ranks computed them, so a slow rank contributes fewer gradients and stops no
    rank. A gradient that was computed with `base` updates becomes part of update number `base + staleness` at
    the latest, counted from 0.
    """

    _included = 0  # gradients in updates

    def decide(self, reports: Sequence[ClockReport]) -> Decision:
        waiting = sum(report.contributed for report in reports) - self._included
        active = [report for report in reports if not report.has_ended]
        if not active and not waiting:
            return (
                Decision.END if all(report.applied == self.updates for report in reports) else Decision.WAIT
            )
        is_enough = waiting >= len(active)
        return Decision.UPDATE if is_enough and not self._held_by(reports) else Decision.WAIT

    def waits_for(self, reports: Sequence[ClockReport]) -> list[int]:
        computing = [
            rank for rank, report in enumerate(reports) if report.is_computing and not report.has_ended
        ]
        return self._held_by(reports) or computing

    def count(self, gradients: int) -> None:
        """Counts an update of this number of gradients."""
        self.updates += 1
        self._included += gradients

    def _held_by(self, reports: Sequence[ClockReport]) -> list[int]:
        """Returns the ranks with a gradient that would be too old if an update were made without it."""
        oldest = self.updates + 1 - self.staleness
        return [rank for rank, report in enumerate(reports) if not report.has_ended and report.base < oldest]


class WorkerClock(Clock):
    """A clock with updates of 1 gradient from each rank that has not ended: its next gradient."""

    def decide(self, reports: Sequence[ClockReport]) -> Decision:
        if self.waits_for(reports):
            return Decision.WAIT
        is_any = any(report.contributed > self.updates for report in reports)
        return Decision.UPDATE if is_any else Decision.END

    def waits_for(self, reports: Sequence[ClockReport]) -> list[int]:
        missing = [not report.has_ended and report.contributed <= self.updates for report in reports]
        return [rank for rank, is_missing in enumerate(missing) if is_missing]


# ---- The rounds, in each of which all ranks exchange their news ----------------------------------------

# A rank begins a round when it has news, and otherwise after this share of its last step: often enough that
# updates are not late by much, and seldom enough that rounds take no time from the training.
_ROUNDS_PER_STEP = 16
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # in seconds
_POLL_SECONDS = 0.1  # between two looks at the deadline


class Rounds:
    """One rank's side of the rounds, until all ranks have ended. A subclass makes the updates.

    `_changed` guards the state that the program and the thread use.
    """

    def __init__(self, scope: CollectiveScope, clock: Clock) -> None:
        self._scope, self._clock = scope, clock
        self._place = scope.ranks.index(scope.context.rank)
        self._changed = threading.Condition()
        self._contributed = 0  # gradients that this rank has handed over
        self._applied = self._base = clock.updates
        self._is_computing, self._has_ended, self._has_news = True, False, False
        self._options = 0
        self._reports: list[ClockReport] = []
        self._failure: BaseException | None = None
        self._is_running = True
        self._pause, self._last_step = _SHORTEST_PAUSE, time.monotonic()

    def start(self) -> None:
        """Starts the thread. A program that ends early is not kept from ending by it."""
        threading.Thread(target=self._run, name="sirtaki-staleness", daemon=True).start()

    def end(self) -> None:
        """Notes that this rank computes no further gradients. The thread takes part until none does."""
        with self._changed:
            self._has_ended, self._has_news, self._is_computing = True, True, False
            self._changed.notify_all()

    def _update(self) -> None:
        """Makes an update. All ranks do so at the same time."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Does what follows the last round, in the thread."""

    def _contribute(self) -> None:
        """Counts a gradient of this rank, which is not computing now. The caller holds the lock."""
        now = time.monotonic()
        pause = (now - self._last_step) / _ROUNDS_PER_STEP
        self._pause, self._last_step = min(max(pause, _SHORTEST_PAUSE), _LONGEST_PAUSE), now
        self._contributed += 1
        self._is_computing, self._has_news = False, True
        self._changed.notify_all()

    def _compute_on(self) -> None:
        """Notes that the program computes with the updates that it has. The caller holds the lock."""
        self._base, self._is_computing = self._applied, not self._has_ended

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Waits for something that the thread does. The caller holds the lock.

        Raises:
            DeadlineError: a rank has computed nothing for too long.
            HorovodInternalError: an exchange failed.
        """
        started = time.monotonic()
        while not is_over():
            if self._failure is not None:
                raise self._failure
            with self._scope.context.steps.exposed:
                self._changed.wait(_POLL_SECONDS)
            waited = time.monotonic() - started
            limit = float(self._scope.context.setting("stall_deadline"))
            if limit and waited > limit and not is_over():
                raise self._deadline_error(waited)

    def _deadline_error(self, waited: float) -> DeadlineError:
        peers = self._scope.context.topology.peers
        ranks = [self._scope.ranks[place] for place in self._clock.waits_for(self._reports)]
        names = ", ".join(f"rank {rank} on {peers[rank].host}" for rank in ranks)
        return DeadlineError(
            f"rank {self._scope.context.rank} has waited {waited:.1f} s for the next gradient of "
            f"{names or 'any rank or server'}: staleness={self._clock.staleness} does not let it run on; "
            "look at what holds that rank, or set --stall-deadline"
        )

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # the program raises it in its next step
            with self._changed:
                self._failure = error
        self._leave()
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def _round(self) -> bool:
        """Meets the threads of all other ranks once; returns whether there will be a further round."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news, self._pause)
            self._has_news = False
            own = self._report()
        reports = self._reports = self._gather(own)
        self._compare_options(reports)
        decision = self._clock.decide(reports)
        if decision is Decision.UPDATE:
            self._update()
        return decision is not Decision.END

    def _report(self) -> ClockReport:
        base = self._base if self._is_computing else self._clock.updates
        state = self._is_computing, self._has_ended
        return ClockReport(self._contributed, base, *state, self._applied, self._options)

    def _gather(self, own: ClockReport) -> list[ClockReport]:
        row = torch.tensor([[*map(int, own)]], dtype=torch.int64)
        (rows,) = self._scope.derived("reports").run_group(ALLGATHER, [row])
        return [
            ClockReport(contributed, base, bool(is_computing), bool(has_ended), applied, options)
            for contributed, base, is_computing, has_ended, applied, options in rows.tolist()
        ]

    def _compare_options(self, reports: Sequence[ClockReport]) -> None:
        """Compares the options of ranks with equally many updates. All ranks raise the same error, if any."""
        first: dict[int, int] = {}
        for place, report in enumerate(reports):
            other = first.setdefault(report.applied, place)
            if reports[other].options != report.options:
                ranks = [self._scope.ranks[index] for index in (other, place)]
                raise ParametersDifferError(
                    f"ranks {ranks[0]} and {ranks[1]} have applied updates up to number {report.applied} "
                    "with different hyper-parameters, so their parameters differ; ranks take different "
                    "numbers of steps: change them by updates, in optimizer.register_step_post_hook"
                )


# ---- Updates, which are made of the gradients at hand on all ranks -------------------------------------


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
        self._parameters = [parameter.detach() for parameter in parameters]
        self._sum = GradientSum(len(parameters))
        self._included = 0  # this rank's gradients in applied updates
        self._updates: deque[Update] = deque()
        self.start()

    def hand_over(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds the gradients of a step to the sum for the next update."""
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
            own, steps = self._sum.take()
        size = len(self._scope.ranks)
        header = torch.zeros(size + len(own), dtype=torch.int64)
        header[self._place] = steps
        header[size:] = torch.tensor([tensor is not None for tensor in own], dtype=torch.int64)
        parts = [header, *filled(own, self._parameters)]
        summed, *sums = self._scope.derived("update").run_group(ALLREDUCE_IN_PLACE, parts)
        counts, present = summed[:size].tolist(), summed[size:].tolist()
        total = sum(counts)
        divisor = max(total, size)  # when ranks have ended, a gradient does not weigh more
        gradients = [
            item.div_(divisor) if is_present else None for item, is_present in zip(sums, present, strict=True)
        ]
        with self._changed:
            self._batches.count(total)
            self._updates.append(Update(gradients, counts))
            self._changed.notify_all()


# ---- The sum of gradients that wait for an update ------------------------------------------------------


class GradientSum:
    """Sums of gradients, in memory of their own."""

    def __init__(self, parameters: int) -> None:
        self._sums: list[Tensor | None] = [None] * parameters
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

    def take(self) -> tuple[list[Tensor | None], int]:
        """Returns the sum for each parameter, None without gradients, and the number of steps in the sums."""
        taken = self._sums, self._count
        self._sums, self._count = [None] * len(self._sums), 0
        return taken
