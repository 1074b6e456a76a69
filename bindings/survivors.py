"""Objects that outlive their world in an elastic job: optimizers, samplers and other context holders."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sirtaki.bindings.context import Context
    from sirtaki.bindings.observing.elastic_timeline import ElasticTimeline
    from sirtaki.bindings.observing.observe import RankChange
    from sirtaki.bindings.observing.step_counters import StepCounters


@dataclass(frozen=True)
class Membership:
    """The members of a generation.

    Attributes:
        generation: its number.
        workers: the number of each member's process, by rank: a process has the same one for life.
        initial: the number of members of the first generation.
    """

    generation: int
    workers: Sequence[int]
    initial: int


class Survivor(Protocol):
    """An object that is made in a world and used in the next world."""

    def move_to(self, context: Context) -> None:
        """Continues in another world. All ranks move the same objects, in the same order."""

    def retire(self) -> None:
        """Ends: it was made by an execution of the training function that has been left."""


class Survivors:
    """The survivors of a process, in the order of their creation.

    An object that was made before `hvd.elastic.run` moves from world to world. One that the training function
    has made does not: the function begins anew in each world and makes another, also on ranks that have just
    joined.

    Attributes:
        changes: the changes of the ranks so far.
        membership: that of the present world; None before the first one.
        process_sets: those that were added before `hvd.elastic.run`, equal on all ranks.
        timeline: goes on from world to world; None if none has been started.
        averages_over_initial: whether averages of gradients divide by the size of the first generation.
        has_averaged_early: whether a program that averages gradients has been traced before the first world.
        has_begun: whether `hvd.elastic.run` has begun.
        committed_steps, committed_seconds: the steps of this process in commits, and the time for them.
    """

    def __init__(self) -> None:
        self.changes: list[RankChange] = []
        self.membership: Membership | None = None
        self.process_sets: list[Any] = []
        self.timeline: ElasticTimeline | None = None
        self.averages_over_initial = False
        self.has_averaged_early = False
        self.committed_steps, self.committed_seconds = 0, 0.0
        self._kept: list[weakref.ref[Survivor]] = []
        self._made_inside: list[weakref.ref[Survivor]] = []
        self.has_begun = False

    def add(self, survivor: Survivor) -> None:
        """Adds an object, which is held weakly. One that is there already stays where it is."""
        if all(reference() is not survivor for reference in (*self._kept, *self._made_inside)):
            (self._made_inside if self.has_begun else self._kept).append(weakref.ref(survivor))

    @property
    def kept(self) -> list[Survivor]:
        """Returns the objects that were made before `hvd.elastic.run` and still live."""
        return [survivor for reference in self._kept if (survivor := reference()) is not None]

    def begin(self) -> None:
        """Records that `hvd.elastic.run` begins: objects made from now on belong to the training function."""
        self.has_begun = True

    def commit(self, steps: StepCounters) -> None:
        """Adds the steps since the last commit of this process: no loss of a rank undoes them any more."""
        number, seconds = steps.commit()
        self.committed_steps += number
        self.committed_seconds += seconds

    def move_to(self, context: Context) -> None:
        """Moves the objects to another world.

        There the host waits for GPUs: no operation that fails after its launch may leave an undefined result
        that a step uses and a commit keeps.
        """
        context.survivors = self
        context.wait_on_host()
        made_inside, self._made_inside = self._made_inside, []
        for reference in made_inside:
            if (survivor := reference()) is not None:
                survivor.retire()
        self._kept = [reference for reference in self._kept if reference() is not None]
        for reference in list(self._kept):
            if (survivor := reference()) is not None:
                survivor.move_to(context)
