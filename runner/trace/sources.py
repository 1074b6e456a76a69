"""The files that a user names: timelines of ranks, the result of hvdrun, that of `sirtaki trace merge`, or
failure reports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sirtaki.runner.launch.errors import LaunchError, explained
from sirtaki.runner.observe.timeline import TimelinePart, elastic_parts, part_of, rank_files
from sirtaki.runner.observe.timeline_events import EventFile
from sirtaki.runner.trace.formats import percent

_HEAD = b'{"ph": "M", "name": "process_name"'  # how the file of a rank begins
_REPORT_HEAD = b'{"rank": '
_REPORT = re.compile(r"rank[0-9]+\.json")


class Source(NamedTuple):
    """A file. `part` is what its name says of an elastic job, None for other jobs and for merged files;
    `is_report`: it is a failure report.
    """

    path: Path
    part: TimelinePart | None
    is_report: bool = False


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """Returns the files of folders, and the other ranks' files beside a named file.

    Raises LaunchError if there is none.
    """
    found = {file: Source(file, part_of(file), _is_report(file)) for path in paths for file in _files(path)}
    return sorted(found.values(), key=_order)


def _files(path: Path) -> Iterator[Path]:
    with explained(f"cannot read {path}"):
        if path.is_dir():
            files = [file for file in sorted(path.iterdir()) if _is_timeline(file) or _is_report(file)]
        elif _is_report(path):
            files = [path, *(file for file in sorted(path.parent.iterdir()) if _is_report(file))]
        else:
            files = [part.file(path) for part in elastic_parts(path)] or rank_files(path)
    if not files and path.is_dir():
        raise LaunchError(
            f"{path} has no timelines, which `hvdrun --timeline-filename FILE` writes, and no failure reports"
        )
    if not files:
        raise LaunchError(f"there is no file {path}")
    yield from files


def _is_timeline(file: Path) -> bool:
    return file.is_file() and next(iter(EventFile(file)), b"").startswith(_HEAD)


def _is_report(file: Path) -> bool:
    """Returns whether a file is a failure report, which a rank has written when its world failed."""
    if not _REPORT.fullmatch(file.name) or not file.is_file():
        return False
    with open(file, "rb") as opened:
        return opened.read(len(_REPORT_HEAD)) == _REPORT_HEAD


def _order(source: Source) -> tuple[TimelinePart, Path]:
    return source.part or TimelinePart(0, 0), source.path


# ---- How far the files of a trace have been read: large files take a while -----------------------------


_LINES = 4096  # between two looks at the position: a few milliseconds
Show = Callable[[str], None]


def show_nothing(text: str) -> None:
    """Receives the texts of a meter where nobody looks at them."""


class Meter:
    """The share of all `paths` that has been read. `show` receives texts such as "reading t.json: 45 %"."""

    def __init__(self, verb: str, paths: Sequence[Path], show: Show) -> None:
        self._verb = verb
        self._show = show
        self._sizes = {path: path.stat().st_size for path in paths if path.is_file()}
        self._before = 0  # bytes of the files that have been read to their ends

    def lines(self, file: EventFile) -> Iterator[bytes]:
        """Yields the events of a file of the trace. Raises OSError."""
        whole = max(sum(self._sizes.values()), 1)
        for number, line in enumerate(file):
            if number % _LINES == 0:
                share = min((self._before + file.position) / whole, 1)
                self._show(f"{self._verb} {file.path.name}: {percent(share)}")
            yield line
        self._before += self._sizes.get(file.path, 0)
