"""The command line of `sirtaki bench`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sirtaki.runner.allocation import find_allocation
from sirtaki.runner.bench.collective_report import CollectiveReport
from sirtaki.runner.bench.kinds import KINDS, SETTINGS
from sirtaki.runner.bench.messages import Plan, Refusal, World
from sirtaki.runner.bench.peers import CUDA, DEVICES, MPI, PEERS, check_peers, left_out, parse_peers
from sirtaki.runner.bench.plot import SUFFIXES, check_plot, draw
from sirtaki.runner.bench.ranks import command, environment, messages
from sirtaki.runner.bench.report import Load, Report
from sirtaki.runner.bench.sizes import ITEMSIZES, check_range, parse_factor, parse_size
from sirtaki.runner.cores import usable_cores
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.options import OptionParser, add_options_for_hosts, whole_number
from sirtaki.runner.terminal_status import terminal_status

_USAGE = "sirtaki bench [OPERATION] -np N [-H HOST:SLOTS,… | --hostfile FILE] [options]"
_DESCRIPTION = (
    "Measures an operation by size of the tensors, in the columns of nccl-tests, beside the limit of this "
    "machine and beside other libraries. Results are checked. Exits with 0 if they are right, 1 if one is "
    "wrong, 2 if it could not run."
)
_STDOUT = "-"


def main(arguments: Sequence[str]) -> int:
    """Runs the measurement and returns its exit code. Raises LaunchError if it cannot."""
    options = parser().parse_args(arguments)
    plan = make_plan(options)
    with terminal_status("starting ranks") as note:
        report = _measure(options, plan, note)
    if options.json != _STDOUT:
        print("\n".join(report.foot_lines()))
    if options.json is not None:
        _write_json(options.json, report)
    if options.plot is not None and isinstance(report, CollectiveReport):
        draw(report, options.plot)
    return report.exit_code


def parser() -> OptionParser:
    """Returns the parser of the options."""
    options = OptionParser(prog="sirtaki bench", usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False)
    options.example = "for example: sirtaki bench allreduce -np 2"
    add = options.add_argument
    names = f"{', '.join(KINDS)} (allreduce)"
    add("operation", nargs="?", metavar="OPERATION", default="allreduce", help=names)
    add("-np", "-n", "--num-proc", dest="size", metavar="N", type=whole_number, help="number of ranks")
    add("--oversubscribe", action="store_true", help="start more than 16 ranks per core")
    add_options_for_hosts(options)
    add("-b", dest="first", metavar="SIZE", type=parse_size, help="the first size, in bytes (8)")
    add("-e", dest="last", metavar="SIZE", type=parse_size, help="the last size (64M)")
    add("-f", dest="factor", metavar="FACTOR", type=parse_factor, help="between two sizes (4)")
    add("-d", dest="dtype", metavar="DTYPE", help=f"{', '.join(ITEMSIZES)} (float32)")
    add("--device", metavar="DEVICE", help="cpu or cuda, where tensors are (cpu)")
    add("--rounds", metavar="N", type=whole_number, default=11, help="blocks of calls for each size (11)")
    add("--peers", metavar="NAME,…", default="", help=f"also measure {', '.join(PEERS)}, in turns")
    picture = f"draw the bandwidths to FILE, which ends with {' or '.join(SUFFIXES)}"
    add("--plot", metavar="FILE", type=Path, help=picture)
    add(
        "--json", metavar="FILE", help="also write the figures as JSON to FILE; - prints them instead of text"
    )
    options.set_defaults(**{name: setting.default for name, setting in SETTINGS.items()})
    return options


def _measure(options: argparse.Namespace, plan: Plan, note: Callable[[str], None]) -> Report:
    """Runs the ranks, and shows each result as soon as it has come."""

    def show(lines: Iterable[str]) -> None:
        text = "\n".join(lines)
        if options.json != _STDOUT:
            note("")
            print(text, flush=True)

    load = Load(os.getloadavg()[0], usable_cores())
    report: Report | None = None
    refusal = ""
    kind = KINDS[plan.operation]
    blocks = 1 if kind.tells_each_block else 1 + plan.rounds
    with contextlib.closing(messages(command(options, plan), environment(plan), blocks)) as received:
        for message in received:
            if isinstance(message, str):
                note(message)
            elif isinstance(message, Refusal):
                refusal = message.reason  # raised when the ranks have ended
            elif isinstance(message, World):
                report = kind.report(plan, message, load)
                show(report.head_lines())
            elif report is not None:
                show(report.take(message))
    if refusal:
        raise LaunchError(refusal)
    if report is None or not report.is_complete:
        raise LaunchError("the ranks have ended without a result")
    return report


def _write_json(path: str, report: Report) -> None:
    text = report.as_json() + "\n"
    if path == _STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}") from None


# Checks the options of `sirtaki bench` before anything is started, and makes the ranks' plan of them.


_MOST_ROUNDS = 200  # ranks send a figure for each


def make_plan(options: Namespace) -> Plan:
    """Returns the plan that the options ask for. Raises LaunchError if there can be none."""
    kind = KINDS.get(options.operation)
    if kind is None:
        raise LaunchError(f"there is no operation {options.operation!r}: choose one of {', '.join(KINDS)}")
    if options.dtype not in ITEMSIZES:
        raise LaunchError(f"-d takes {', '.join(ITEMSIZES)}, not {options.dtype!r}")
    if options.rounds > _MOST_ROUNDS:
        raise LaunchError(f"--rounds takes at most {_MOST_ROUNDS}, not {options.rounds}")
    for name, setting in SETTINGS.items():
        if name not in kind.settings and getattr(options, name) != setting.default:
            raise LaunchError(f"{options.operation} is measured without {setting.flag}: leave it out")
    if "first" in kind.settings:
        check_range(options.first, options.last, options.factor)
    if options.device not in DEVICES:
        raise LaunchError(f"--device takes {' or '.join(DEVICES)}, not {options.device!r}")
    named = parse_peers(options.peers)
    others = left_out(named, options.device)
    peers = [name for name in named if name not in others]
    for name in named:
        if name not in kind.peers:
            taken = ", ".join(kind.peers) or "none"
            raise LaunchError(f"{options.operation} is not measured with the peer {name}: it takes {taken}")
    _check_ranks(options, peers)
    extra = "torch" if options.device == CUDA else kind.extra
    if importlib.util.find_spec(extra) is None:
        raise LaunchError(f"{options.operation} needs {extra}: pip install 'sirtaki[{extra}]'")
    check_peers(peers, options.dtype)
    if options.plot is not None:
        check_plot(options.plot)
    sizes = options.first, options.last, options.factor
    return Plan(options.operation, options.dtype, *sizes, options.rounds, peers, options.device, others)


def _check_ranks(options: Namespace, peers: Sequence[str]) -> None:
    """Raises LaunchError if there are too few ranks, or if MPI would have to start them elsewhere."""
    if options.size == 1:
        raise LaunchError("one rank exchanges nothing: measure with -np 2 or more")
    has_hosts = options.hosts is not None or options.hostfile is not None
    if options.size is None and not has_hosts and find_allocation(os.environ) is None:
        raise LaunchError("the number of ranks is missing: give it with -np, for example -np 2")
    if MPI in peers and (has_hosts or options.size is None):
        raise LaunchError(
            f"the peer {MPI} is measured on this host only: give -np, and leave out -H and --hostfile"
        )
