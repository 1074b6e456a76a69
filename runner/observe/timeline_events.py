"""The events in the file of a timeline: an event per line, plain or compressed by gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

_GZIP = b"\x1f\x8b"
_MAX_LINE = 1 << 20  # bytes; the core's longest event, a refused operation, has less than 16 KiB


class EventFile:
    """The events of a file. A killed process leaves a file without its end, and perhaps half a line.

    Attributes:
        is_whole: after an iteration, whether the file had its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_whole = False
        self._raw: IO[bytes] | None = None

    @property
    def position(self) -> int:
        """The number of bytes of the file that have been read, during an iteration."""
        return 0 if self._raw is None or self._raw.closed else self._raw.tell()

    def __iter__(self) -> Iterator[bytes]:
        """Yields each event, without the comma behind it. Raises OSError."""
        pending: bytes | None = None  # the last line may be incomplete
        self.is_whole = False
        for line in self._lines():
            event = line.strip().rstrip(b",")
            if event in (b"", b"[", b"]"):
                self.is_whole = event == b"]" or (self.is_whole and not event)
                continue
            self.is_whole = False
            if pending is not None:
                yield pending
            pending = event
        if pending is not None and _is_complete(pending):
            yield pending

    def _lines(self) -> Iterator[bytes]:
        with open(self.path, "rb") as raw:
            self._raw = raw
            is_compressed = raw.read(len(_GZIP)) == _GZIP
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if is_compressed else raw as opened:
                try:
                    while line := opened.readline(_MAX_LINE):
                        yield line
                except (EOFError, zlib.error, gzip.BadGzipFile):  # it ends here
                    return


def write_events(out: IO[bytes], events: Iterable[bytes]) -> None:
    """Writes a complete list of events, an event per line."""
    out.write(b"[\n")
    separator = b""
    for event in events:
        out.write(separator + event)
        separator = b",\n"
    out.write(b"\n]\n")


def in_microseconds(nanoseconds: int) -> str:
    """Formats a time in the unit of the format, with nanosecond resolution."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _is_complete(event: bytes) -> bool:
    try:
        json.loads(event)
    except ValueError:
        return False
    return True
