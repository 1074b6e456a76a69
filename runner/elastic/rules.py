"""The user's rules for an elastic job, and the pauses of slots that lose their workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from sirtaki.runner.elastic.actions import Slot

LOST, EXIT = "lost", "exit"  # the values of --elastic-survive
_FIRST_PAUSE = 1.0  # seconds: a replacement imports its modules on the cores on which the others recover


@dataclass(frozen=True)
class Rules:
    """The user's rules.

    Attributes:
        start: the number of workers with which the job starts.
        minimum, maximum: bounds of the number of ranks.
        timeout: seconds to wait for enough workers.
        reset_limit: losses that end the job when one more happens; None for any number.
        cooldown: the shortest and the longest pause of a slot, in seconds, from its second loss on.
        survive: the ends of a worker that the job survives: LOST, or EXIT for any.
        patience: seconds to wait for a member that lives, but does not leave its generation.
    """

    start: int
    minimum: int
    maximum: int
    timeout: float = 600.0
    reset_limit: int | None = None
    cooldown: tuple[float, float] = (1.0, 60.0)
    survive: str = LOST
    patience: float = 600.0


@dataclass
class Cooling:
    """The pauses of slots: doubled with each loss, from the second on."""

    cooldown: tuple[float, float]
    _losses: dict[Slot, int] = field(default_factory=dict)
    _until: dict[Slot, float] = field(default_factory=dict)

    def note_loss(self, slot: Slot, now: float) -> None:
        losses = self._losses[slot] = self._losses.get(slot, 0) + 1
        shortest, longest = self.cooldown
        pause = _FIRST_PAUSE if losses == 1 else shortest * 2.0 ** (losses - 2)
        self._until[slot] = now + min(pause, longest)

    def is_over(self, slot: Slot, now: float) -> bool:
        return self._until.get(slot, 0.0) <= now

    def end(self, slot: Slot) -> float:
        """Returns when the pause of a slot ends (time.monotonic())."""
        return self._until.get(slot, 0.0)
