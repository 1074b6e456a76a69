"""Reads the files of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sirtaki.runner.errors import LaunchError
from sirtaki.runner.rendezvous.wire import printable
from sirtaki.runner.trace.failure_reports import read_failure_report
from sirtaki.runner.trace.file_reader import FileReader
from sirtaki.runner.trace.formats import ranks_text
from sirtaki.runner.trace.meter import Meter, Show, show_nothing
from sirtaki.runner.trace.sources import Source
from sirtaki.runner.trace.trace import Row, Trace


def read_trace(sources: Sequence[Source], show: Show = show_nothing) -> Trace:
    """Reads all files; `show` receives how much of them has been read.

    Raises:
        LaunchError: a file cannot be read or is no timeline, or two are of one rank.
    """
    meter = Meter("reading", [source.path for source in sources], show)
    readers: list[FileReader] = []
    texts: dict[str, int] = {}
    lacks: list[str] = []
    for source in sorted(sources, key=lambda source: source.is_report):  # timelines first
        if len(sources) > 1 and _is_empty(source.path):
            lacks.append(f"{source.path.name} is empty: its process was killed early, or the disk was full")
            continue
        try:
            if source.is_report:
                lacks += _add_report(source, readers, texts)
            else:
                readers.append(FileReader(source, texts))
                readers[-1].read(meter)
        except OSError as error:
            raise LaunchError(f"cannot read {source.path}: {error.strerror or error}") from None
    rows = [row for reader in readers for row in reader.rows.values()]
    _refuse_twins(rows)
    trace = Trace(_numbered(rows), list(texts), [*lacks, *(text for one in readers for text in one.lacks())])
    trace.lacks += _missing_ranks(trace)
    return trace


def _add_report(source: Source, readers: list[FileReader], texts: dict[str, int]) -> Iterator[str]:
    """Adds the events of a failure report to the row of its rank, or to a new row; yields what it lacks.

    Raises OSError and LaunchError.
    """
    report = read_failure_report(source.path)
    found = [(reader, row) for reader in readers for row in reader.rows.values() if row.rank == report.rank]
    same = [(reader, row) for reader, row in found if row.title.endswith(printable(report.title))]
    if same:
        reader, row = max(same, key=lambda pair: pair[1].generation)  # the last world of the process
        if row.ending is None:
            reader.add_report(report, row)
    elif any(row.generation for reader in readers for row in reader.rows.values()):
        yield f"{source.path.name} is left out: no timeline tells the generation of its process"
    elif found:
        raise LaunchError(
            f"{found[0][1].source.path} and {source.path} are of two processes of rank {report.rank}: name "
            "the files of one job"
        )
    else:  # beside the file that hvdrun has merged, on the clock of that
        merged = next((reader for reader in readers if len(reader.rows) > 1), None)
        if merged is None:
            readers.append(merged := FileReader(source, texts))
        merged.add_report(report, None)


def _is_empty(file: Path) -> bool:
    """Returns whether a file has no more than the beginning of a list."""
    try:
        return file.stat().st_size <= len("[\n")
    except OSError:
        return False  # the error is that of reading it


def _refuse_twins(rows: Sequence[Row]) -> None:
    """Raises LaunchError if two rows are of one rank: files of one job have each rank once."""
    seen: dict[tuple[int, int], Row] = {}
    for row in rows:
        if row.rank is None:
            continue
        twin = seen.setdefault((row.generation, row.rank), row)
        if twin is not row:
            raise LaunchError(
                f"{twin.source.path} and {row.source.path} are both of rank {row.rank}: name the files of "
                "one job, and a merged file without those that it was made of"
            )


def _numbered(rows: list[Row]) -> list[Row]:
    """Returns the rows in the order of the output, with their process ids there."""
    is_elastic = any(row.generation for row in rows)
    if not is_elastic:
        rows = sorted(rows, key=lambda row: row.rank or 0)
    for index, row in enumerate(rows):
        if is_elastic and row.source.part is None:  # of a merged file, whose events keep their rows
            row.output_pid = row.pid
        else:
            row.output_pid = index if is_elastic or row.rank is None else row.rank
    return rows


def _missing_ranks(trace: Trace) -> Iterator[str]:
    for rows in trace.generations():
        place = f" in generation {rows[0].generation}" if rows[0].generation else ""
        size = max((rows[-1].rank or 0) + 1, *(row.world_size for row in rows))
        missing = sorted({*range(size)} - {row.rank for row in rows if row.rank is not None})
        if missing:
            files, verb = ("file", "is") if len(missing) == 1 else ("files", "are")
            yield f"the {files} of {ranks_text(missing)} {verb} missing{place}"
        if empty := [row.rank or 0 for row in rows if not (row.operations or row.failed or row.ending)]:
            yield f"there are no operations of {ranks_text(empty)}{place}"
