"""Shows how far the files of a trace have been read: large files take a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sirtaki.runner.observe.timeline_events import EventFile
from sirtaki.runner.trace.formats import percent

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
