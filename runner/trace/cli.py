"""The command line of `sirtaki trace`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sirtaki.bindings._version import VERSION
from sirtaki.runner.cli.command import terminal_status
from sirtaki.runner.cli.options import OptionParser
from sirtaki.runner.doctor.findings import Finding, judge
from sirtaki.runner.doctor.report import exit_code, print_lines, summary
from sirtaki.runner.launch.errors import LaunchError, explained
from sirtaki.runner.trace.analysis import Measures, RankMeasures, Step, TensorMeasures, measure
from sirtaki.runner.trace.clocks import HostClock, align_clocks
from sirtaki.runner.trace.doings import as_text
from sirtaki.runner.trace.formats import percent, percentile, ranks_text, time
from sirtaki.runner.trace.merging import write_trace
from sirtaki.runner.trace.reading import read_trace
from sirtaki.runner.trace.rules import TRACE_RULES, TracePicture
from sirtaki.runner.trace.sources import find_sources
from sirtaki.runner.trace.trace import Disagreement, Trace, failures

_USAGE = "sirtaki trace merge FILE… -o FILE | sirtaki trace report FILE… [--json]"
_FILES = (
    "timelines of ranks, a merged one, failure reports, or a folder; files of other ranks beside a named one "
    "are read, too"
)


def main(arguments: Sequence[str]) -> int:
    """Runs a subcommand of `sirtaki trace` and returns its exit code. Raises LaunchError if it cannot."""
    options = _parser().parse_args(arguments)
    run = {"merge": _merge, "report": _report}[options.action]
    return run(options)


class _Parser(OptionParser):
    example = "for example: sirtaki trace report timeline.json"


def _parser() -> OptionParser:
    described = "Joins the timelines of all ranks on one clock, and reports what is slow."
    parser = _Parser(prog="sirtaki trace", usage=_USAGE, description=described, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="merge | report")

    def add_action(name: str, summary: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, usage=_USAGE, help=summary, description=summary, allow_abbrev=False)
        action.add_argument("files", nargs="+", metavar="FILE", type=Path, help=_FILES)
        return action

    merge = add_action("merge", "write one trace of all ranks, for https://ui.perfetto.dev")
    merge.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="compressed if its name ends in .gz"
    )
    report = add_action("report", "print which steps, ranks and tensors are slow, and why")
    report.add_argument("--json", action="store_true", help="print all steps, ranks and tensors as JSON")
    return parser


def _merge(options: argparse.Namespace) -> int:
    sources = find_sources(options.files)
    output: Path = options.output
    if output.resolve() in {source.path.resolve() for source in sources}:
        raise LaunchError(f"{output} would replace a file that is read: choose another name with -o")
    with terminal_status("reading") as show:
        trace = read_trace(sources, show)
        show("joining the clocks")
        clocks = align_clocks(trace)
        with explained(f"cannot write {output}"):
            arrows = write_trace(trace, clocks, output, show)
    print("\n".join([*describe_trace(trace), *describe_clocks(clocks)]))
    print(
        f"{output} has the events of all, with {arrows} arrows to the last rank of each exchange; "
        "https://ui.perfetto.dev shows it"
    )
    return 0


def _report(options: argparse.Namespace) -> int:
    with terminal_status("reading") as show:
        trace = read_trace(find_sources(options.files), show)
        show("joining the clocks")
        clocks = align_clocks(trace)
        show("measuring the steps")
        picture = TracePicture(trace, clocks, measure(trace, clocks))
    findings = judge(picture, TRACE_RULES)
    if options.json:
        print(as_json(picture, findings))
    else:
        print_lines(as_lines(picture, findings))
    return exit_code(findings)


# ---- The output of `sirtaki trace report`: lines of text, and all measures as JSON ---------------------


SCHEMA = 1
_ROWS = 10  # of the text's tables; JSON has all
_MAX_NAME = 40
_MEANWHILE = "meanwhile"  # the head of a column of words
_Cells = Sequence[str]


def as_json(picture: TracePicture, findings: Sequence[Finding]) -> str:
    """Returns all measures as a JSON object, in seconds; `schema` changes with the meaning of a field."""
    trace, clocks, measures = picture
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "exit_code": exit_code(findings),
        "clocks": [_json_clock(clock) for clock in clocks],
        "steps": [_json_step(step) for step in measures.steps],
        "ranks": [_json_rank(rank) for rank in measures.ranks],
        "tensors": [_json_tensor(trace, item) for item in _by_wait(measures)],
        "failures": [_json_failure(failure) for failure in failures(trace)],
        "endings": [
            {"generation": row.generation, "rank": row.rank, **row.ending._asdict()}
            for row in trace.rows
            if row.ending is not None
        ],
        "findings": [
            {name: value for name, value in asdict(found).items() if name != "hosts"} for found in findings
        ],
    }
    return json.dumps(values, indent=2)


def as_lines(picture: TracePicture, findings: Sequence[Finding]) -> list[str]:
    """Returns the text."""
    trace, clocks, measures = picture
    lines = [*describe_trace(trace), *describe_clocks(clocks), *_endings(trace)]
    for table in (_steps(measures), _ranks(measures), _tensors(trace, measures)):
        lines += ["", *table]
    return [*lines, "", *map(str, findings), *([""] if findings else []), summary(findings)]


def describe_trace(trace: Trace) -> Iterator[str]:
    """Yields the files' ranks and what they hold."""
    for rows in trace.generations():
        place = f"generation {rows[0].generation}: " if rows[0].generation else ""
        count = sum(len(row.operations) for row in rows)
        yield f"{place}{len(rows)} {'rank' if len(rows) == 1 else 'ranks'}, {count} operations"


def describe_clocks(clocks: Sequence[HostClock]) -> Iterator[str]:
    """Yields the offset of each clock, with its error."""
    for number, clock in enumerate(clocks):
        place = f"{', '.join(clock.hosts)} ({ranks_text(clock.ranks)})"
        moved = f"clock of {place}: moved by {_seconds(clock.moved + clock.offset):+.9f} s"
        if number == 0:
            yield f"clock: that of {place}"
        elif clock.error is None:
            yield f"{moved}, by the wall clocks; no exchange bounds the error"
        else:
            yield f"{moved} ± {time(clock.error)}, from {clock.exchanges} exchanges"


def _endings(trace: Trace) -> Iterator[str]:
    """Yields what each rank was doing when its world failed, or when its recorder was written."""
    for rows in trace.generations():
        place = f" in generation {rows[0].generation}" if rows[0].generation else ""
        endings = [row.ending for row in rows if row.ending is not None]
        for happened, is_failure in (("the world failed", True), ("the recorder was written", False)):
            doings = [f"  {ending.doing}" for ending in endings if ending.is_failure == is_failure]
            if doings:
                yield from ("", f"when {happened}{place}:", *doings)


def _steps(measures: Measures) -> Iterator[str]:
    steps = measures.steps
    if not steps:
        yield "steps: none"
        return
    walls = [step.wall for step in steps]
    exposed, in_flight = (sum(getattr(step, name) for step in steps) for name in ("exposed", "in_flight"))
    causes = Counter(step.cause or "no single cause" for step in steps)
    middle, long = (time(percentile(walls, share)) for share in (0.5, 0.99))
    overlap = _share(in_flight - exposed, in_flight)
    yield (
        f"steps: {len(steps)}, wall p50 {middle}, p99 {long}; exposed {_share(exposed, measures.wall)} of "
        f"the time; overlap {overlap} of the exchanges"
    )
    yield f"causes: {', '.join(f'{cause} {count}' for cause, count in causes.most_common())}"
    slowest = sorted(steps, key=lambda step: -step.wall)[:_ROWS]
    head = ("step", "wall", "exposed", "wait", "decision", "transfer", "overlap", "critical rank", "cause")
    yield from _table(f"the slowest {len(slowest)} steps", head, map(_step_cells, slowest))


def _step_cells(step: Step) -> _Cells:
    times = map(time, (step.wall, step.exposed, step.wait, step.decision, step.transfer))
    number = _numbered(step.generation, step.number)
    overlap = _share(step.in_flight - step.exposed, step.in_flight)
    return number, *times, overlap, "-" if step.rank is None else f"{step.rank}", step.cause or "-"


def _ranks(measures: Measures) -> Iterator[str]:
    head = ("rank", "host", "caused wait", "own wait", "exposed", "times last", "late steps", _MEANWHILE)
    ranks = sorted(measures.ranks, key=lambda rank: -rank.caused)[:_ROWS]
    yield from _table("ranks, by the wait that they caused to others", head, map(_rank_cells, ranks))


def _rank_cells(rank_measures: RankMeasures) -> _Cells:
    row, times_last, late = rank_measures.row, rank_measures.times_last, len(rank_measures.late_steps)
    times = map(time, (rank_measures.caused, rank_measures.waited, rank_measures.exposed))
    meanwhile = as_text(rank_measures.doings()) or "-"
    return _numbered(row.generation, row.rank), row.host, *times, f"{times_last}", f"{late}", meanwhile


def _numbered(generation: int, number: int | None) -> str:
    """Returns the number of a step or of a rank, "2/17" in generation 2 of an elastic job."""
    return f"{generation}/{number}" if generation else f"{number}"


def _tensors(trace: Trace, measures: Measures) -> Iterator[str]:
    head = ("tensor", "kind", "count", "bytes", "wait p50", "p99", "transfer p50", "p99")
    tensors = _by_wait(measures)[:_ROWS]
    yield from _table(
        "tensors, by wait and transfer", head, (_tensor_cells(trace, tensor) for tensor in tensors)
    )


def _tensor_cells(trace: Trace, tensor_measures: TensorMeasures) -> _Cells:
    name = trace.texts[tensor_measures.name]
    short = name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME // 2]}…{name[1 - _MAX_NAME // 2 :]}"
    times = (
        time(percentile(values, share))
        for values in (tensor_measures.waits, tensor_measures.transfers)
        for share in (0.5, 0.99)
    )
    return (
        short,
        trace.texts[tensor_measures.kind],
        f"{tensor_measures.count}",
        f"{tensor_measures.bytes}",
        *times,
    )


def _by_wait(measures: Measures) -> list[TensorMeasures]:
    return sorted(measures.tensors.values(), key=lambda tensor: -(sum(tensor.waits) + sum(tensor.transfers)))


def _table(title: str, head: _Cells, rows: Iterable[_Cells]) -> Iterator[str]:
    """Yields a title and aligned columns, words to the left and numbers to the right."""
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    yield f"{title}:"
    for row in cells:
        aligned: list[Callable[[int], str]] = [
            text.rjust if at and head[at] != _MEANWHILE else text.ljust for at, text in enumerate(row)
        ]
        yield "  " + "  ".join(align(width) for align, width in zip(aligned, widths, strict=True)).rstrip()


def _share(part: float, whole: float) -> str:
    return percent(part / whole) if whole else "-"


def _seconds(nanoseconds: float) -> float:
    return nanoseconds / 1e9


def _json_clock(clock: HostClock) -> dict[str, Any]:
    return {
        "hosts": clock.hosts,
        "ranks": clock.ranks,
        "offset_seconds": _seconds(clock.moved + clock.offset),
        "error_seconds": None if clock.error is None else _seconds(clock.error),
        "exchanges": clock.exchanges,
    }


def _json_step(step: Step) -> dict[str, Any]:
    times = ("wall", "in_flight", "exposed", "wait", "decision", "transfer")
    return {
        "generation": step.generation,
        "step": step.number,
        **{f"{name}_seconds": _seconds(getattr(step, name)) for name in times},
        "critical_rank": step.rank,
        "cause": step.cause or None,
    }


def _json_rank(rank_measures: RankMeasures) -> dict[str, Any]:
    return {
        "generation": rank_measures.row.generation,
        "rank": rank_measures.row.rank,
        "host": rank_measures.row.host,
        "operations": len(rank_measures.row.operations),
        "caused_wait_seconds": _seconds(rank_measures.caused),
        "own_wait_seconds": _seconds(rank_measures.waited),
        "exposed_seconds": _seconds(rank_measures.exposed),
        "times_last": rank_measures.times_last,
        "meanwhile": [doing._asdict() for doing in rank_measures.doings()],
        "late_steps": [
            {"step": step.number, "wait_seconds": _seconds(step.wait), "at_first_submission": step.at_first}
            for step in rank_measures.late_steps
        ],
    }


def _json_tensor(trace: Trace, tensor_measures: TensorMeasures) -> dict[str, Any]:
    measured = {"wait": tensor_measures.waits, "transfer": tensor_measures.transfers}
    return {
        "name": trace.texts[tensor_measures.name],
        "kind": trace.texts[tensor_measures.kind],
        "count": tensor_measures.count,
        "bytes": tensor_measures.bytes,
        **{
            f"{name}_p{share}_seconds": _seconds(percentile(values, share / 100))
            for name, values in measured.items()
            for share in (50, 99)
        },
    }


def _json_failure(disagreement: Disagreement) -> dict[str, Any]:
    submitted = [
        {"rank": rank, "kind": kind, "bytes": size, "place": disagreement.places.get(rank)}
        for rank, (kind, size) in sorted(disagreement.submitted.items())
    ]
    return {
        "name": disagreement.name,
        "generation": disagreement.generation,
        "statuses": sorted(disagreement.statuses),
        "error": disagreement.error or None,
        "submitted": submitted,
    }
