"""Processes that end before any worker has enlisted: a program that cannot start ends the job at last."""

from __future__ import annotations

from collections import Counter

from sirtaki.runner.elastic.actions import Slot
from sirtaki.runner.elastic.slots import Slots
from sirtaki.runner.elastic.workers import Status, Worker, Workers

_PER_SLOT = 3  # losses: a process may be killed for reasons outside of the program
_MOST = 30  # losses of each rank at the start: short lives may use ever more slots
_NOT_THERE = "before it calls the function of hvd.elastic.run"


class FirstStarts:
    """The losses of processes before any worker has enlisted, by slot; `start` is the number of ranks."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._losses: Counter[Slot] = Counter()

    def judge(self, lost: Worker, why: str, workers: Workers, slots: Slots) -> str:
        """Notes a loss. Returns why the job ends; "" if another process may have more success.

        The loss of a whole host, whose slots are not there any more, does not count. Of several hosts, at
        least two have to have failed, so that one host without memory does not end the job.
        """
        if any(one.report is not None for one in workers.all()) or lost.slot not in slots:
            return ""
        self._losses[lost.slot] += 1
        used = {one.slot for one in workers.all() if one.slot in slots}
        starting = {one.slot for one in workers.living(Status.STARTING)}
        if len({slot.host for slot in used}) < min(2, len(slots.hosts())):
            return ""
        failed_everywhere = all(self._losses[slot] >= _PER_SLOT for slot in used)
        is_over = self._losses.total() >= _MOST * self._start and starting <= self._losses.keys()
        if not failed_everywhere and not is_over:
            return ""
        memory = ", often because the machine ran out of memory" * ("SIGKILL" in why)
        times = f"it was started {self._losses.total()} times, in {len(used)} {_slots(len(used))}"
        return f"the program ends {_NOT_THERE}: {times}; the last one was {lost.name}: {why}{memory}"


def _slots(count: int) -> str:
    return "slot" if count == 1 else "slots"
