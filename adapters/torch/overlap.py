"""Whether it pays to exchange gradients while the backward pass goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

# A pass that sleeps for at least half of the time leaves its core to an exchange.
_IDLE_SHARE = 0.5
_NANOSECONDS = 1e-9


class Overlap:
    """Decides from pass to pass whether gradients leave early.

    The exchange needs a core while it runs. If the ranks of a host have cores to spare, or a GPU computes, it
    hides behind the backward pass. Otherwise the two take turns on one core, and changing between them costs
    more than it hides; unless the pass itself waits for something else than the processor.
    """

    def __init__(
        self, *, has_spare_core: bool, clocks: Callable[[], tuple[float, float]] | None = None
    ) -> None:
        """`clocks` tells two times in seconds: what has passed, and what of it this thread wanted a core."""
        self._has_spare_core = has_spare_core
        self._clocks = clocks or _clocks
        self._begun: tuple[float, float] | None = None
        self._is_worth_it = has_spare_core

    @property
    def is_worth_it(self) -> bool:
        """Whether the gradients of the next pass should leave early, judging by the last one."""
        return self._is_worth_it

    def begin(self) -> None:
        """A pass has made its first gradient, in this thread."""
        if self._begun is None and not self._has_spare_core:
            self._begun = self._clocks()

    def end(self) -> None:
        """The pass has ended, in the same thread."""
        if self._begun is not None:
            (begun, wanted_before), self._begun = self._begun, None
            now, wanted = self._clocks()
            self._is_worth_it = wanted - wanted_before < (1 - _IDLE_SHARE) * (now - begun)

    def drop(self) -> None:
        """The pass has raised."""
        self._begun = None


def _clocks() -> tuple[float, float]:
    """Seconds that have passed, and those in which this thread has run or waited for a core."""
    return time.monotonic(), time.thread_time() + _waited_for_core()


def _waited_for_core() -> float:
    """How long this thread has been ready to run while others ran; 0 where Linux does not count that."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as statistics:
            return int(statistics.read().split()[1]) * _NANOSECONDS
    except (OSError, ValueError, IndexError):
        return 0.0
