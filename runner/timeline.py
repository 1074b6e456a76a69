"""Makes one timeline of those of all ranks: in FILE of rank 0's there and FILE.rank1, FILE.rank2 and so on.

hvdrun does this at the end of a job with --timeline-filename. For timelines that a script has started:

    python -m sirtaki.runner.timeline FILE

A rank that was killed leaves a file without its end, and perhaps half a line: all whole lines are taken.
Times are those of the monotonic clock of the first rank's host: those of other hosts are moved by what their
wall clocks tell, and so are as exact as these agree.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_HEAD_LINES = 16  # in which a rank tells how far its clocks are apart
_ONE_HOST_NS = 20_000_000  # so far apart may ranks of one host have read the same two clocks
_TIME = re.compile(rb'"ts":([0-9]+)\.([0-9]{3})')  # microseconds


def merge_timelines(path: Path) -> int:
    """Merges into `path` what the other ranks have written beside it, and removes that.

    Returns from how many ranks it came. Raises OSError where a file cannot be read or written.
    """
    parts = _parts(path)
    if not parts:
        return 0
    merged = path.with_name(f"{path.name}.merging")
    with open(merged, "wb") as out:
        out.write(b"[\n")
        separator = b""
        clocks = [_wall_minus_monotonic(part) for part in parts]
        for part, clock in zip(parts, clocks, strict=True):
            later = _later_than(clocks[0], clock)
            for event in _events(part):
                out.write(separator + (_moved(event, later) if later else event))
                separator = b",\n"
        out.write(b"\n]\n")
    os.replace(merged, path)
    for part in parts:
        if part != path:
            part.unlink()
    return len(parts)


def _parts(path: Path) -> list[Path]:
    others = {}
    for file in path.parent.glob("*"):
        number = file.name.removeprefix(f"{path.name}.rank")
        if number != file.name and number.isdecimal():
            others[int(number)] = file
    return [file for file in (path, *(others[rank] for rank in sorted(others))) if file.is_file()]


def _events(part: Path) -> Iterator[bytes]:
    """The events of one rank's file, which has a line for each."""
    held: bytes | None = None  # the last line may be half a one
    with open(part, "rb") as file:
        for line in file:
            event = line.strip().rstrip(b",")
            if event in (b"", b"[", b"]"):
                continue
            if held is not None:
                yield held
            held = event
    if held is not None and _is_whole(held):
        yield held


def _wall_minus_monotonic(part: Path) -> int | None:
    """How far the clocks of a rank's host are apart, in nanoseconds; None if its file does not tell."""
    for event, _ in zip(_events(part), range(_HEAD_LINES), strict=False):
        if b'"clock"' in event:
            try:
                return int(json.loads(event)["args"]["wall_minus_monotonic_ns"])
            except (ValueError, KeyError, TypeError):
                return None
    return None


def _later_than(first: int | None, clock: int | None) -> int:
    """How many nanoseconds to add to the times of a rank to have those of the first one's host."""
    if first is None or clock is None or abs(clock - first) < _ONE_HOST_NS:
        return 0
    return clock - first


def _moved(event: bytes, later: int) -> bytes:
    """The event with all its times so many nanoseconds later."""

    def move(match: re.Match[bytes]) -> bytes:
        time = max(int(match[1] + match[2]) + later, 0)
        return b'"ts":%d.%03d' % divmod(time, 1000)

    return _TIME.sub(move, event)


def _is_whole(event: bytes) -> bool:
    try:
        json.loads(event)
    except ValueError:
        return False
    return True


def remove_timelines(path: Path) -> None:
    """Removes what another job has left, so that it is not taken for this one's."""
    for part in _parts(path):
        part.unlink()


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m sirtaki.runner.timeline FILE", file=sys.stderr)
        return 2
    try:
        count = merge_timelines(Path(sys.argv[1]))
    except OSError as error:
        print(f"the timelines cannot be merged: {error}", file=sys.stderr)
        return 1
    print(f"{sys.argv[1]} holds the timelines of {count} rank{'' if count == 1 else 's'}")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
