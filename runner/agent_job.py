"""The ranks of one host as seen by its agent, which starts them from one message and collects their files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.capacity import Capacity
from sirtaki.runner.environment import RankEnvironment, arrived, thread_counts
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.failure_analysis import ExitStatus
from sirtaki.runner.frames import LIMITS, Frame, Kind
from sirtaki.runner.job_directory import make_job_directory
from sirtaki.runner.process import RankProcess
from sirtaki.runner.rank_start import REPORTS, TIMELINE, why_not_started
from sirtaki.runner.reaper import Reaper
from sirtaki.runner.rendezvous.key import write_key

_PIECE_BYTES = 64 * 1024


class AgentJob:
    """The ranks of this host. `values` are those of the START frame."""

    def __init__(self, values: Mapping[str, Any], cores: int, reaper: Reaper) -> None:
        """Raises LaunchError, or KeyError, TypeError or ValueError if the values are malformed."""
        self._reaper = reaper
        self._capacity = Capacity(len(values["placements"]), cores)
        if not values.get("oversubscribe"):
            self._capacity.check()
        self._folder = Path(make_job_directory(reaper))
        self._command = [str(one) for one in values["command"]]
        self._placements = [RankPlacement(*map(int, place)) for place in values["placements"]]
        self._base = arrived({str(k): str(v) for k, v in values["environment"].items()}, os.environ)
        key_file = self._folder / "key"
        write_key(str(key_file), bytes.fromhex(values["key"]))
        additions = thread_counts(len(self._placements), cores, self._base)
        additions |= {str(k): str(v) for k, v in values["additions"].items()}
        additions.setdefault(REPORTS, str(self._folder))
        self._reports = Path(additions[REPORTS])
        if TIMELINE in additions:
            additions[TIMELINE] = str(self._folder / "timeline")
        self._environment = RankEnvironment(
            str(values["job"]),
            str(values["rendezvous"]),
            str(key_file),
            float(values["start_timeout"]),
            additions,
        )
        self._reported: set[int] = set()
        self.running: list[RankProcess] = []

    def start(self, say: Callable[[Frame], None]) -> None:
        """Starts all ranks, and reports the process of each, or why it could not be started."""
        for place in self._placements:
            environment = self._environment.of(place, self._base)
            if shortage := self._capacity.shortage(len(self.running)):
                raise LaunchError(shortage)
            try:
                rank = RankProcess(place.rank, self._command, environment, self._reaper)
            except OSError as error:
                text = why_not_started(place.rank, self._command, error)
                say(Frame(Kind.REFUSED, place.rank, text.encode(errors="replace")))
                continue
            self.running.append(rank)
            say(Frame.of_number(Kind.STARTED, place.rank, rank.pid))

    def look(self) -> Iterator[ExitStatus]:
        """Yields the endings of ranks since the last call."""
        for rank in self.running:
            if ending := rank.check():
                yield ending

    def signal(self, rank: int, number: int) -> None:
        for one in self.running:
            if one.rank == rank:
                one.signal(number)

    def reap(self) -> None:
        for rank in self.running:
            if rank.ending:
                rank.reap()

    def new_reports(self) -> Iterator[Frame]:
        """Yields the failure reports that ranks have written since the last call."""
        for place in self._placements:
            file = self._reports / f"rank{place.rank}.json"
            if place.rank in self._reported or not file.is_file():
                continue
            self._reported.add(place.rank)
            with open(file, "rb") as opened:
                content = opened.read(LIMITS[Kind.REPORT] + 1)
            if len(content) <= LIMITS[Kind.REPORT]:
                yield Frame(Kind.REPORT, place.rank, content)

    def timelines(self) -> Iterator[Frame]:
        """Yields the timelines of all ranks, in pieces."""
        for place in self._placements:
            name = "timeline" if place.rank == 0 else f"timeline.rank{place.rank}"
            if (self._folder / name).is_file():
                with open(self._folder / name, "rb") as opened:
                    while piece := opened.read(_PIECE_BYTES):
                        yield Frame(Kind.TIMELINE, place.rank, piece)
