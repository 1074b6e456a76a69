"""Records the changes of the ranks: in `hvd.stats()`, in the timeline, and beside the failure reports."""

from __future__ import annotations

import time

from sirtaki.bindings import observe
from sirtaki.bindings.change_records import write_changes
from sirtaki.bindings.context import Context
from sirtaki.bindings.survivors import Survivors
from sirtaki.runner.rendezvous.elastic.messages import World

_PHASES = ("AGREE", "REBUILD", "STATE")


class ChangeClock:
    """Measures one change of the ranks as this rank goes through it, and records it at its end."""

    def __init__(self, survivors: Survivors) -> None:
        """Begins: this rank leaves its world."""
        self._survivors = survivors
        self._before = survivors.membership
        self._moments = [time.monotonic_ns()]
        self._detect: int | None = None  # nanoseconds
        self._record: observe.Change | None = None
        self._context: Context | None = None

    def begin_again(self) -> None:
        """Begins the phases again, because the ranks have changed in the middle; the first one goes on."""
        del self._moments[1:]

    def end_phase(self) -> None:
        """Ends one of the phases: agree, rebuild, state."""
        self._moments.append(time.monotonic_ns())

    def take_world(self, world: World) -> None:
        """Ends the first phase, "agree", with the arbiter's answer.

        The arbiter counts from the first news of the change. If the ranks change in the middle, the first
        world says when that was.
        """
        self.end_phase()
        if self._detect is None:
            first_news = self._moments[-1] - 1000 * world.elapsed
            self._detect = max(self._moments[0] - first_news, 0) if self._before else 0

    def record(self, context: Context, world: World) -> None:
        """Records the change, whose phases have ended."""
        before, workers, detect = self._before, world.workers, self._detect or 0
        agree, rebuild, state = (
            (end - begin) / 1e9 for begin, end in zip(self._moments, self._moments[1:], strict=False)
        )
        gone = [rank for rank, worker in enumerate(before.workers) if worker not in workers] if before else []
        joined = [rank for rank, worker in enumerate(workers) if before and worker not in before.workers]
        self._record = observe.Change(
            generation=world.generation,
            size=len(workers),
            rank=world.rank,
            commit=world.commit,
            reason=world.text,
            lost=gone,
            joined=joined,
            detect_seconds=detect / 1e9,
            agree_seconds=agree,
            rebuild_seconds=rebuild,
            state_seconds=state,
            first_step_seconds=None,
        )
        self._context = context
        self._survivors.changes.append(self._record)
        write_changes(context, self._survivors.changes)
        if (timeline := self._survivors.timeline) is not None:
            timeline.add_change(self._record, _PHASES, self._moments, self._moments[0] - detect)

    def end_first_step(self) -> None:
        """Adds the time until the first check of the new generation."""
        if self._record is not None and self._context is not None:
            self.end_phase()
            begin, end = self._moments[-2:]
            self._record["first_step_seconds"] = (end - begin) / 1e9
            write_changes(self._context, self._survivors.changes)
            if (timeline := self._survivors.timeline) is not None:
                timeline.add_slice("FIRST STEP", begin, end)
