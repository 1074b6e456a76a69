"""Merges the timelines of all ranks: FILE is rank 0's and the result; FILE.rank1, FILE.rank2, ... the
others'.

hvdrun does this at the end of a job with --timeline-filename. To merge timelines that a script started:

    python -m sirtaki.runner.timeline FILE

A killed rank leaves a file without its end, and perhaps a partial line: all whole lines are used. Times are
those of the monotonic clock of the first rank's host: times of other hosts are shifted by the difference of
their wall clocks, so they are as exact as these clocks agree.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_HEAD_LINES = 16  # a rank writes the difference of its clocks within these lines
_ONE_HOST_NS = 20_000_000  # tolerated difference of two ranks of one host that have read the same two clocks
_TIME = re.compile(rb'"ts": ?([0-9]+)\.([0-9]{3})')  # microseconds, as the core writes them


def merge_timelines(path: Path) -> int:
    """Merges into `path` the files that the other ranks have written beside it, and removes those.

    Returns the number of ranks merged. Raises OSError where a file cannot be read or written.
    """
    files = _files(path)
    if not files:
        return 0
    merged = path.with_name(f"{path.name}.merging")
    with open(merged, "wb") as out:
        out.write(b"[\n")
        separator = b""
        clocks = [_wall_minus_monotonic(rank_file) for rank_file in files]
        for rank_file, clock in zip(files, clocks, strict=True):
            offset = _clock_offset(clocks[0], clock)
            for event in _events(rank_file):
                out.write(separator + (_shifted(event, offset) if offset else event))
                separator = b",\n"
        out.write(b"\n]\n")
    os.replace(merged, path)
    for rank_file in files:
        if rank_file != path:
            rank_file.unlink()
    return len(files)


def _files(path: Path) -> list[Path]:
    others = {}
    for file in path.parent.glob("*"):
        number = file.name.removeprefix(f"{path.name}.rank")
        if number != file.name and number.isdecimal():
            others[int(number)] = file
    return [file for file in (path, *(others[rank] for rank in sorted(others))) if file.is_file()]


def _events(rank_file: Path) -> Iterator[bytes]:
    """Yields the events of one rank's file, which holds one per line."""
    pending: bytes | None = None  # the last line may be incomplete
    with open(rank_file, "rb") as file:
        for line in file:
            event = line.strip().rstrip(b",")
            if event in (b"", b"[", b"]"):
                continue
            if pending is not None:
                yield pending
            pending = event
    if pending is not None and _is_complete(pending):
        yield pending


def _wall_minus_monotonic(rank_file: Path) -> int | None:
    """Returns the difference of a host's clocks, in nanoseconds; None if the file does not state it."""
    for event, _ in zip(_events(rank_file), range(_HEAD_LINES), strict=False):
        if b'"clock"' in event:
            try:
                return int(json.loads(event)["args"]["wall_minus_monotonic_ns"])
            except (ValueError, KeyError, TypeError):
                return None
    return None


def _clock_offset(first: int | None, clock: int | None) -> int:
    """Returns how many nanoseconds to add to a rank's times to convert them to the first host's clock."""
    if first is None or clock is None or abs(clock - first) < _ONE_HOST_NS:
        return 0
    return clock - first


def _shifted(event: bytes, offset: int) -> bytes:
    """Returns the event with all its times shifted by `offset` nanoseconds."""

    def shift(match: re.Match[bytes]) -> bytes:
        time = max(int(match[1] + match[2]) + offset, 0)
        return b'"ts":%d.%03d' % divmod(time, 1000)

    return _TIME.sub(shift, event)


def _is_complete(event: bytes) -> bool:
    try:
        json.loads(event)
    except ValueError:
        return False
    return True


def remove_timelines(path: Path) -> None:
    """Removes another job's files, so that they are not mistaken for this job's."""
    for rank_file in _files(path):
        rank_file.unlink()


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
