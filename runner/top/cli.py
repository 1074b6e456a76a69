"""The command line of `sirtaki top`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live

from sirtaki.runner.cli.options import OptionParser
from sirtaki.runner.launch.errors import LaunchError, explained
from sirtaki.runner.top.jobs import INTERVAL_SECONDS, find_job
from sirtaki.runner.top.rows import PROBLEM, RankRow, rows_of
from sirtaki.runner.top.snapshot import Snapshot, from_line
from sirtaki.runner.top.table import render

_PLAIN_WIDTH = 200  # columns of a table that no terminal shows
_DESCRIPTION = (
    "Shows the ranks of a job on this host, once a second: what each does, for whom it waits, and its rates. "
    "JOB is the process number of hvdrun or of a rank, or the job's folder; without it, the only job of "
    "yours. If the output is no terminal, one table is printed, with --json a line a second. Exits with 2 if "
    "it could not run; after one table, or --once, with 1 if a rank is lost, silent or stuck; else with 0."
)


def main(arguments: Sequence[str]) -> int:
    """Shows a job until it ends, or Ctrl-C; returns the exit code. Raises LaunchError."""
    options = _parser().parse_args(arguments)
    if options.replay is not None and (options.job or options.record is not None):
        raise LaunchError("--replay shows a recording: it takes neither a job nor --record")
    snapshots = _recorded(options.replay) if options.replay is not None else _watched(options.job)
    with contextlib.ExitStack() as stack:
        if options.record is not None:
            snapshots = _recording(snapshots, stack.enter_context(_open(options.record)))
        if options.json:
            return _print_lines(snapshots, options.once)
        if options.once or not sys.stdout.isatty():
            return _print_table(snapshots, is_once=options.once or options.replay is None)
        return _show(snapshots)


def _parser() -> OptionParser:
    usage = "sirtaki top [JOB] [--once] [--json] [--record FILE] [--replay FILE]"
    parser = OptionParser(prog="sirtaki top", usage=usage, description=_DESCRIPTION, allow_abbrev=False)
    parser.example = "for example: sirtaki top"
    add = parser.add_argument
    add("job", metavar="JOB", nargs="?", help="hvdrun's process number, a rank's, or the job's folder")
    add("--once", action="store_true", help="look for one second, print, and end")
    add("--json", action="store_true", help="print each look as a line of JSON")
    add("--record", metavar="FILE", type=Path, help="also write each look to FILE")
    add("--replay", metavar="FILE", type=Path, help="show what --record has written, at its pace")
    return parser


def _watched(name: str | None) -> Iterator[Snapshot]:
    """Yields a snapshot of a job per second until the job is over."""
    job = find_job(name)
    is_first = True
    for snapshot in job.snapshots():
        if not snapshot.ranks:
            break
        yield snapshot
        is_first = False
    if is_first:
        raise LaunchError(
            f"no rank of {job.folder} has written its state: they have not called init() yet, or are stopped"
        )


def _recorded(file: Path) -> Iterator[Snapshot]:
    """Yields the snapshots of a recording at its pace. Raises LaunchError."""
    before: Snapshot | None = None
    try:
        with file.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    snapshot = from_line(line)
                except ValueError as error:
                    raise LaunchError(f"{file}:{number} cannot be shown: {error}") from None
                if before is not None and sys.stdout.isatty():
                    time.sleep(max(0.0, min(snapshot.time - before.time, 10 * INTERVAL_SECONDS)))
                before = snapshot
                yield snapshot
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read {file}: {error}") from None
    if before is None:
        raise LaunchError(f"{file} has no snapshots")


def _open(file: Path) -> TextIO:
    with explained(f"cannot write {file}"):
        return file.open("w", buffering=1)


def _recording(snapshots: Iterator[Snapshot], file: TextIO) -> Iterator[Snapshot]:
    for snapshot in snapshots:
        file.write(snapshot.as_line() + "\n")
        yield snapshot


def _pairs(snapshots: Iterable[Snapshot]) -> Iterator[tuple[Snapshot | None, Snapshot]]:
    """Yields each snapshot with its predecessor, None for the first snapshot."""
    before = None
    for snapshot in snapshots:
        yield before, snapshot
        before = snapshot


def _print_lines(snapshots: Iterator[Snapshot], is_once: bool) -> int:
    rows: Sequence[RankRow] = ()
    for before, snapshot in _pairs(snapshots):
        print(snapshot.as_line(), flush=True)
        if is_once:
            rows = rows_of(before, snapshot)
            if before is not None:
                break
    return _exit_code(rows)


def _print_table(snapshots: Iterator[Snapshot], is_once: bool) -> int:
    """Prints the table of the second snapshot (the first with rates) if `is_once`, else of the last."""
    last: tuple[Snapshot | None, Snapshot] | None = None
    for last in _pairs(snapshots):
        if is_once and last[0] is not None:
            break
    if last is None:
        return 0
    rows = rows_of(*last)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    console.print(render(last[1], rows))
    return _exit_code(rows) if is_once else 0


def _show(snapshots: Iterator[Snapshot]) -> int:
    table: RenderableType | None = None
    with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as live:
        for before, snapshot in _pairs(snapshots):
            table = render(snapshot, rows_of(before, snapshot))
            live.update(table, refresh=True)
    if table is not None:
        Console(highlight=False).print(table, "this was the last look")
    return 0


def _exit_code(rows: Sequence[RankRow]) -> int:
    return int(any(row.level == PROBLEM for row in rows))
