"""Evaluates the files that ranks leave, after all have ended: merges their timelines, and summarises what
each rank was doing when the job failed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sirtaki.bindings.bootstrap.connection.wire import MessageKind
from sirtaki.runner.launch.process import remove_reports, report_file
from sirtaki.runner.supervise.failure_analysis import name_process

if TYPE_CHECKING:
    from sirtaki.runner.observe.timeline import JobTimeline

_MAX_LINES = 8
_STARTERS = (
    "runpy.py",
    "<frozen runpy>",
)  # the code that runs `python -m`, which is all that is left at its end
# Raised when a malformed report is read: wrong types, endless nesting, or numbers out of bounds.
MALFORMED = (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError)


@dataclass(frozen=True)
class PostMortem:
    """The files that ranks leave. `reports`: the folder of their failure reports; `keeps_reports`: whether
    the user has asked to keep them.

    Reports from other hosts are transferred, and stored beside the others.
    """

    size: int
    reports: Path
    keeps_reports: bool = False
    timeline: JobTimeline | None = None
    names_hosts: bool = False

    def prepare(self) -> None:
        """Removes the files of another job, before the ranks start. Raises LaunchError."""
        if self.timeline is not None:
            self.timeline.prepare()
        remove_reports(self.reports, range(self.size))

    def store_report(self, rank: int, content: bytes) -> None:
        """Stores the failure report of a rank on another host."""
        file = self._file(rank)
        with contextlib.suppress(OSError):  # on failure one line is missing
            if not file.exists():  # hosts may share the folder
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)

    def has_reports_of(self, ranks: Iterable[int]) -> bool:
        """Returns whether all these ranks have written their reports."""
        return all(self._file(rank).exists() for rank in ranks)

    def read_reports(self) -> dict[int, Mapping[str, Any]]:
        """Returns the ranks' failure reports, by rank."""
        found = {rank: self._read(rank) for rank in range(self.size)}
        return {rank: report for rank, report in found.items() if isinstance(report, dict) and report}

    def lines(self, event: str) -> list[str]:
        """Returns the lines to show to the user, after all ranks have ended. `event` is the verb of "the job
        …", such as "failed"; "" if nothing went wrong.
        """
        lines = self._describe_activity(event) if event else []
        if self.timeline is not None:
            lines.append(self.timeline.merge())
        return lines

    def _describe_activity(self, event: str) -> list[str]:
        lines = [line for report in self.read_reports().values() if (line := self._describe_safely(report))]
        if len(lines) > _MAX_LINES:
            lines[_MAX_LINES - 1 :] = [f"and {len(lines) - _MAX_LINES + 1} more ranks"]
        if lines:
            more = f" ({self.reports} has more)" if self.keeps_reports else ""
            lines.insert(0, f"what each rank was doing when the job {event}{more}:")
        return lines

    def _describe_safely(self, report: Mapping[str, Any]) -> str:
        try:
            return describe(report, self.names_hosts)
        except MALFORMED:  # a malformed report, whoever wrote it
            return ""

    def _file(self, rank: int) -> Path:
        return report_file(self.reports, rank)

    def _read(self, rank: int) -> Mapping[str, Any]:
        try:
            with open(self._file(rank), "rb") as file:
                report = json.loads(file.read(MessageKind.REPORT.limit))
        except (OSError, *MALFORMED):  # no report: its world did not fail, or it was killed
            return {}
        return report if isinstance(report, dict) else {}


def describe(report: Mapping[str, Any], names_host: bool = False) -> str:
    """Formats a rank's report as a line."""
    waiting = [
        operation
        for operation in report["unfinished"]
        if operation["state"] in ("queued", "waiting for other ranks")
    ]
    moving = [operation for operation in report["unfinished"] if operation["state"] in ("agreed", "moving")]
    if moving:
        what = f"moved the data of {_name(moving)}"
    elif waiting:
        what = f"waited for other ranks to submit {_name(waiting)}"
    else:
        what = "had nothing in flight"
    who = name_process(f"rank {report['rank']}", report["pid"], report["host"] if names_host else "")
    place = place_of(report["stack"])
    return f"  {who} {what}{place and f', {place}'}"


def _name(operations: Sequence[Mapping[str, Any]]) -> str:
    first = operations[0]
    more = f" (and {len(operations) - 1} more)" if len(operations) > 1 else ""
    return f"'{first['name']}' ({first['kind']}) for {first['submitted_seconds_ago']:.1f} s{more}"


def place_of(stack: Sequence[Mapping[str, Any]]) -> str:
    """Formats the innermost of the user's own functions, else the innermost function: "in f() at a.py:1"."""
    inner = [frame for frame in stack if Path(frame["file"]).name not in _STARTERS]
    own = [frame for frame in inner if not frame["library"]]
    if not inner:
        return ""
    frame = (own or inner)[0]
    function = "" if frame["function"] == "<module>" else f"in {frame['function']}() "
    return f"{function}at {Path(frame['file']).name}:{frame['line']}"
