"""The reports of an agent about the spares of its host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sirtaki.runner.frames import Frame, Kind


@dataclass(frozen=True)
class SpareReports:
    """Passes the news of an agent's spares on to hvdrun."""

    send: Callable[[Frame], None]

    def started(self, lane: int, pid: int) -> None:
        self.send(Frame.of_number(Kind.STARTED, lane, pid))

    def waits(self, lane: int, modules: int, seconds: float) -> None:
        self.send(Frame.of_values(Kind.SPARE_WAITS, {"modules": modules, "seconds": seconds}, lane))

    def ended(self, lane: int, why: str) -> None:
        self.send(Frame(Kind.SPARE_ENDED, lane, why.encode(errors="replace")))
