"""Counters of the training steps that the optimizers of an adapter complete."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sirtaki.bindings.library import ffi, lib

_RECENT_WAITS = 64  # that are remembered with their times


class Stepper(NamedTuple):
    """An optimizer over all ranks; autotune may measure its steps.

    Attributes:
        name: tells the optimizers of a process apart.
        hands_over: whether the setting hand_over concerns it.
        operations: the number of those that it submits in each step; 0: unknown.
        bytes: of these, where gradients are not compressed; those absent on all ranks included.
        parts: in which gradients are submitted at most, when they are handed over early; 0: unknown.
    """

    name: str
    hands_over: bool = False
    operations: int = 0
    bytes: int = 0
    parts: int = 0

    @property
    def number(self) -> int:
        """Returns the number by which compiled programs, and the core, know it: more than 1.

        Equal in processes that create the same optimizers in the same order.
        """
        return zlib.crc32(self.name.encode()) + 2


class ExposedTime:
    """The time in which a program waits for the exchange of its step: `with` it, the program waits."""

    def __init__(self) -> None:
        # The time of the waits that have ended, the number of those inside each other, the beginning of the
        # outermost. Another thread reads them, so they are replaced together.
        self._state = (0.0, 0, 0.0)
        self._has_waited = False
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT_WAITS)

    @property
    def recent(self) -> list[tuple[float, float]]:
        """Returns begin and end of the last waits, by `time.perf_counter`, the oldest first."""
        recent = list(self._recent.copy())  # at once: the program goes on
        _, depth, begin = self._state
        return [*recent, (begin, time.perf_counter())] if depth else recent

    @property
    def seconds(self) -> float | None:
        """Returns the time until now; None if the program has never waited."""
        ended, depth, begin = self._state
        present = time.perf_counter() - begin if depth else 0.0
        return ended + present if self._has_waited else None

    def __enter__(self) -> None:
        ended, depth, begin = self._state
        self._has_waited = True
        self._state = (ended, depth + 1, begin if depth else time.perf_counter())

    def __exit__(self, *error: object) -> None:
        ended, depth, begin = self._state
        if depth == 1:
            end = time.perf_counter()
            self._recent.append((begin, end))
            ended += end - begin
        self._state = (ended, depth - 1, begin)


class NativeContext(Protocol):
    """The core's context, which exists as long as this object."""

    pointer: Any


class StepCounters:
    """The training steps of a rank in a world: `bindings.observing.observe.Steps` documents the counters.

    The core counts them: in compiled programs, steps end on threads without Python.

    Attributes:
        exposed: measures the waits of the program.
        may_be_late: whether an optimizer steps without ranks that are late.
        listener: is called with the optimizer at the end of each step that has one; None: nobody listens.
        committed: the number of steps until the last commit.
    """

    def __init__(self, native: NativeContext) -> None:
        self.exposed = ExposedTime()
        self.may_be_late = False
        self.listener: Callable[[Stepper], None] | None = None
        self.committed = 0
        self._committed_seconds = 0.0
        self._native = native

    def end(self, number: int = 1, by: Stepper | None = None) -> None:
        """Counts a step, or `number` equal steps, that have just ended.

        Args:
            number: the number of steps.
            by: the optimizer; None if its steps are those of a compiled program, or not of all ranks.
        """
        if by is not None and self.listener is not None:
            self.listener(by)
        lib.srt_end_steps(self._native.pointer, number, 0)

    def read(self) -> Any:
        """Returns the counters now: a struct srt_step_counts."""
        counted = ffi.new("srt_step_counts *", {"struct_size": ffi.sizeof("srt_step_counts")})
        lib.srt_get_steps(self._native.pointer, counted)
        return counted

    def commit(self) -> tuple[int, float]:
        """Returns the number of the steps, and the productive seconds, since the last commit."""
        counted = self.read()
        number, seconds = counted.number - self.committed, counted.productive - self._committed_seconds
        self.committed, self._committed_seconds = counted.number, counted.productive
        return number, seconds


# ---- Counters of the gradients that an adapter compresses before the core sees them --------------------


@dataclass
class CompressionCounters:
    """The counters of a rank: `sirtaki.bindings.observing.observe.Compressed` documents them."""

    exchanges: int = 0
    exact_bytes: float = 0.0
    sent_bytes: float = 0.0
    relative_error: float = 0.0
