"""hvdrun's command line."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .command import find_program
from .cores import usable_cores
from .environment import thread_counts
from .errors import LaunchError

USAGE = "hvdrun -np N [options] command [arguments]"
EXAMPLE = "for example: hvdrun -np 2 python train.py"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}\nUsage: {self.usage}; {EXAMPLE}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs hvdrun and returns its exit code: that of the rank that failed, or 0."""
    try:
        _open_standard_streams()
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except LaunchError as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    options, settings_of_core = _parse(arguments)
    if options.version:
        from sirtaki._core._version import VERSION

        print(f"hvdrun (sirtaki) {VERSION}")
        return 0
    _refuse_inside_a_rank()
    if not options.command:
        raise LaunchError(f"say what to run, {EXAMPLE}")
    if options.size is None:
        raise LaunchError(f"say how many ranks to start with -np, {EXAMPLE}")
    path, warning = find_program(options.command, options.size, os.environ)
    cores = usable_cores()
    threads = thread_counts(options.size, cores, os.environ)

    from .launch import Settings, run_job

    settings = Settings(
        size=options.size,
        command=[path, *options.command[1:]],
        start_timeout=options.start_timeout,
        output_folder=options.output_filename,
        verbose=options.verbose,
        additions={**threads, **settings_of_core, **_timeline_environment(options)},
        timeline=_timeline_of(options),
        notices=tuple(filter(None, (warning, _describe_threads(threads, options.size, cores)))),
    )
    return run_job(settings)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """The options, and those among them that are settings of the core, as environment variables."""
    parser = _Parser(
        prog="hvdrun",
        usage=USAGE,
        description=f"Starts N ranks of a command on this machine, {EXAMPLE}",
        add_help=False,
        allow_abbrev=False,
    )
    _add_options(parser)
    options, unknown = parser.parse_known_args(arguments)
    if not unknown and not options.help:
        return options, {}
    from .knobs import add_knobs, knob_environment

    knobs = add_knobs(parser)
    if options.help:
        parser.print_help()
        sys.exit(0)
    options = parser.parse_args(arguments)
    return options, knob_environment(options, knobs)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this text")
    add("--version", action="store_true", help="show the version")
    add("-np", "-n", "--num-proc", dest="size", metavar="N", type=_rank_count, help="how many ranks to start")
    add(
        "--output-filename",
        metavar="DIR",
        type=Path,
        help="keep what each rank writes in DIR/rank.<number>/stdout and stderr, too",
    )
    add(
        "--start-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=120.0,
        help="how long a rank waits in hvd.init() for the others (120)",
    )
    add(
        "--timeline-filename",
        metavar="FILE",
        type=Path,
        help="write what becomes of each operation on each rank to FILE, for https://ui.perfetto.dev",
    )
    add("--timeline-mark-cycles", action="store_true", help="mark each Decision in the timeline, too")
    add("--verbose", action="store_true", help="show what hvdrun does")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _timeline_of(options: argparse.Namespace) -> Path | None:
    return options.timeline_filename and options.timeline_filename.absolute()


def _timeline_environment(options: argparse.Namespace) -> dict[str, str]:
    timeline = _timeline_of(options)
    wanted = {"SIRTAKI_TIMELINE": timeline and str(timeline)}
    wanted["SIRTAKI_TIMELINE_MARK_CYCLES"] = "1" if options.timeline_mark_cycles else None
    return {name: value for name, value in wanted.items() if value}


def _rank_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it takes a whole number of at least 1, not '{text}'")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"it takes a number of seconds above 0, not '{text}'")
    return seconds


def _refuse_inside_a_rank() -> None:
    if "SIRTAKI_RANK" in os.environ and "SIRTAKI_JOB" in os.environ:
        raise LaunchError(
            f"this is rank {os.environ['SIRTAKI_RANK']} of a job that hvdrun has started already, "
            "and a rank cannot start a job of its own: run hvdrun once, outside"
        )


def _describe_threads(threads: dict[str, str], size: int, cores: int) -> str:
    if not threads:
        return ""
    name, count = next(iter(threads.items()))
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    usable = "1 usable core" if cores == 1 else f"{cores} usable cores"
    return f"{ranks} on {usable}: {name}={count} for each (set it yourself to change that)"


def _open_standard_streams() -> None:
    """Makes sure that descriptors 0, 1 and 2 are open, so that nothing else ends up there."""
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return
