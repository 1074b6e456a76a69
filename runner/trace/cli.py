"""The command line of `sirtaki trace`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sirtaki.runner.doctor.findings import judge
from sirtaki.runner.doctor.report import exit_code, print_lines
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.options import OptionParser
from sirtaki.runner.terminal_status import terminal_status
from sirtaki.runner.trace.analysis import measure
from sirtaki.runner.trace.clocks import align_clocks
from sirtaki.runner.trace.merging import write_trace
from sirtaki.runner.trace.reading import read_trace
from sirtaki.runner.trace.report import as_json, as_lines, describe_clocks, describe_trace
from sirtaki.runner.trace.rules import TRACE_RULES, TracePicture
from sirtaki.runner.trace.sources import find_sources

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
        try:
            arrows = write_trace(trace, clocks, output, show)
        except OSError as error:
            raise LaunchError(f"cannot write {output}: {error.strerror or error}") from None
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
