"""When the ranks synchronize, and which part of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sirtaki.torch import device
from sirtaki.torch.autograd import CollectiveScope
from sirtaki.torch.compressed.exchange import Agreement
from sirtaki.torch.periodic.exchange import AverageInFlight, Contribution, Parts
from sirtaki.torch.periodic.format import EXACT, Format
from sirtaki.torch.periodic.updates import Update


@dataclass(frozen=True)
class Schedule:
    """Steps between two synchronizations.

    Attributes:
        every: steps between two synchronizations of the same parameters.
        fragments: parts of the parameters, which are synchronized one after another within these steps.
        overlap: steps that a rank takes while an average is under way.
        format: the format of the exchange.
    """

    every: int
    fragments: int = 1
    overlap: int = 0
    format: Format = EXACT

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}, but it has to be a number of steps, 1 or more")
        if not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"fragments is {self.fragments}, but each needs a step of its own: 1 to every={self.every}"
            )
        if not 0 <= self.overlap < max(1, self.every // self.fragments):
            raise ValueError(
                f"overlap is {self.overlap}, but an average has to end before the next one begins: less than "
                f"every // fragments = {self.every // self.fragments}"
            )

    def is_due(self, fragment: int, steps: int) -> bool:
        """Returns whether the average of a fragment begins after this number of steps."""
        return steps % self.every == (fragment + 1) * self.every // self.fragments % self.every


@dataclass
class Fragment:
    """Parameters that are synchronized together.

    Attributes:
        parameters: these parameters.
        buffers: floating buffers of the model, which are averaged with them.
        steps: this rank's steps since the last average began.
    """

    parameters: list[Tensor]
    buffers: list[Tensor] = field(default_factory=list)
    steps: int = 0


class Synchronizer:
    """Counts the steps of one rank, and averages a fragment when it is due.

    A rank whose data has ended, or which has skipped steps, is behind the others. No rank waits for that: all
    ranks average the fragments in the same cyclic order, and a rank at its end (`synchronize`) takes part in
    the others' averages, with the weight of the steps that it has taken since the last one.
    """

    def __init__(
        self, scope: CollectiveScope, schedule: Schedule, fragments: Sequence[Fragment], update: Update
    ) -> None:
        self._schedule, self.fragments, self.update = schedule, fragments, update
        self.memory = schedule.format.memory
        self.move_to(scope)

    def move_to(self, scope: CollectiveScope) -> None:
        """Continues in the world of this scope: see `restart`.

        Raises:
            UnsupportedError: a parameter is on a GPU, for which the core has no such format.
        """
        self.scope = scope
        parameters = [parameter for fragment in self.fragments for parameter in fragment.parameters]
        self._format = self._schedule.format.for_ranks_of(scope, parameters)
        self._agreement = Agreement(self.memory, scope) if self.memory is not None else None
        self.restart()

    def restart(self) -> None:
        """Forgets the steps since the parameters were equal on all ranks, and an average under way."""
        self._steps = 0
        self._is_rewritten = False  # whether the program has changed the parameters since then
        self._next = 0  # the fragment that is averaged next
        self._in_flight: tuple[int, Fragment, AverageInFlight] | None = None  # with the step at which it ends
        for fragment in self.fragments:
            fragment.steps = 0

    @property
    def is_synchronized(self) -> bool:
        """Returns whether this rank has taken no step since the parameters were equal on all ranks."""
        return self._steps == 0

    def agree(self) -> None:
        """Makes the number of compressed averages equal on all ranks. All ranks have to call it.

        Raises:
            ValueError: the ranks have different compressions.
        """
        if self._agreement is not None and not self.scope.has_no_peers:
            self._agreement.start()
            self._agreement.finish()

    def begin(self) -> None:
        """Prepares for a step."""
        for fragment in self.fragments:
            self.update.begin(fragment.parameters)

    def follow(self) -> None:
        """Continues from parameters that the program has set, between a synchronization and the next step."""
        if self.is_synchronized:
            changes = [self.update.follow(fragment.parameters) for fragment in self.fragments]
            self._is_rewritten |= any(changes)

    def stepped(self) -> None:
        """Counts a step, and synchronizes what is due."""
        self._steps += 1
        for fragment in self.fragments:
            fragment.steps += 1
        if self._in_flight is not None and self._in_flight[0] == self._steps:
            self._finish()
        if self._schedule.is_due(self._next, self._steps):
            self._start(has_ended=False)
            if not self._schedule.overlap:
                self._finish()
                if len(self.fragments) == 1 and self.update.equalizes:
                    self._steps = 0

    def synchronize(self) -> None:
        """Synchronizes all parameters once no rank has steps left. All ranks have to call it."""
        self.begin()
        if self._in_flight is not None:
            self._finish()
        all_have_ended = False
        while not all_have_ended:
            self._start(has_ended=True)
            all_have_ended = self._finish()
        for _ in self.fragments[1:]:
            self._start(has_ended=True)
            self._finish()
        self._steps = self._next = 0

    def _start(self, has_ended: bool) -> None:
        fragment, scope = self.fragments[self._next], self.scope.derived(str(self._next))
        self._next = (self._next + 1) % len(self.fragments)
        own = Contribution(fragment.steps / self._schedule.every, has_ended, self._is_rewritten)
        fragment.steps, self._is_rewritten = 0, False
        buffers = [buffer.clone() for buffer in fragment.buffers]
        parts = Parts(self.update.contributions(fragment.parameters), buffers, fragment.parameters)
        average = AverageInFlight(scope, parts, own, self._format)
        self._in_flight = self._steps + self._schedule.overlap, fragment, average

    @torch.no_grad()
    def _finish(self) -> bool:
        assert self._in_flight is not None
        _, fragment, in_flight = self._in_flight
        with device.exposed(self.scope.context, fragment.parameters):
            average = in_flight.wait()
        self._in_flight = None
        count, averages = len(fragment.parameters), average.tensors
        own = averages if averages is None else averages[:count]
        self.update.apply(fragment.parameters, own, average.all_have_ended)
        if averages is not None:
            for buffer, value in zip(fragment.buffers, averages[count:], strict=True):
                buffer.copy_(value)
        return average.all_have_ended


def fragments_of(parameters: Sequence[Tensor], count: int) -> list[Fragment]:
    """Cuts parameters into fragments of similar size, in their order.

    Raises:
        ValueError: there are fewer parameters than fragments.
    """
    if count > len(parameters):
        raise ValueError(f"fragments is {count}, but there are only {len(parameters)} parameters")
    total = sum(parameter.nbytes for parameter in parameters)
    fragments: list[Fragment] = [Fragment([])]
    done = 0
    for place, one in enumerate(parameters):
        is_full = done >= total * len(fragments) / count or len(parameters) - place == count - len(fragments)
        if fragments[-1].parameters and is_full and len(fragments) < count:
            fragments.append(Fragment([]))
        fragments[-1].parameters.append(one)
        done += one.nbytes
    return fragments


def with_buffers(fragments: Sequence[Fragment], model: torch.nn.Module | None) -> list[Fragment]:
    """Adds the floating buffers of a model's state to the last fragment.

    Buffers that are no part of it, such as masks, are constants.
    """
    if model is None:
        return list(fragments)
    state = {id(one) for one in model.state_dict(keep_vars=True).values()}
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point() and id(buffer) in state]
    return [*fragments[:-1], replace(fragments[-1], buffers=buffers)]
