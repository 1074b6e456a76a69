"""The slots of an elastic job: which may be used, and the pauses of those that lose their workers."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence

from sirtaki.runner.elastic.actions import Slot
from sirtaki.runner.elastic.pauses import doubled

_FIRST_PAUSE = 1.0  # seconds: a replacement imports its modules on the cores on which the others recover


class Slots:
    """The slots that may be used, in the order of preference.

    A slot pauses after a loss: `cooldown` is the shortest and the longest pause in seconds, from its second
    loss on; it doubles with each one. On the hosts in `spares`, a process waits that can replace a lost one
    at once.
    """

    def __init__(
        self, slots: Sequence[Slot], cooldown: tuple[float, float], spares: Container[str] = ()
    ) -> None:
        self._slots = list(slots)
        self._cooldown = cooldown
        self._spares = spares
        self._losses: dict[Slot, int] = {}
        self._until: dict[Slot, float] = {}
        self._hosts_until: dict[str, float] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._slots

    def hosts(self) -> set[str]:
        return {slot.host for slot in self._slots}

    def replace(self, slots: Sequence[Slot]) -> None:
        self._slots = list(slots)

    def remove(self, slot: Slot) -> None:
        """Removes a slot; nothing happens if it is not there."""
        self._slots = [one for one in self._slots if one != slot]

    def note_loss(self, slot: Slot, now: float) -> None:
        losses = self._losses[slot] = self._losses.get(slot, 0) + 1
        pause = doubled(*self._cooldown, times=losses - 2)
        if losses == 1:
            pause = 0.0 if slot.host in self._spares else min(_FIRST_PAUSE, self._cooldown[1])
        self._until[slot] = now + pause

    def pause_host(self, host: str, until: float) -> None:
        """Pauses all slots of a host (time.monotonic())."""
        self._hosts_until[host] = until

    def resume_hosts(self) -> None:
        """Ends the pauses of hosts."""
        self._hosts_until.clear()

    def startable(self, used: Collection[Slot], now: float) -> Iterator[Slot]:
        """Yields the free slots that do not pause."""
        return (one for one in self._free(used) if self._paused_until(one) <= now)

    def due(self, used: Collection[Slot]) -> float | None:
        """Returns when the next pause of a free slot ends (time.monotonic())."""
        return min(filter(None, map(self._paused_until, self._free(used))), default=None)

    def _paused_until(self, slot: Slot) -> float:
        """Returns when a slot's pause ends, or has ended; 0 if it had none."""
        return max(self._until.get(slot, 0.0), self._hosts_until.get(slot.host, 0.0))

    def _free(self, used: Collection[Slot]) -> list[Slot]:
        return [slot for slot in self._slots if slot not in used]
