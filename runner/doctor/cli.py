"""The command line of `sirtaki doctor`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sirtaki.runner.cli import named_hosts
from sirtaki.runner.doctor.examination import OWN, examine
from sirtaki.runner.doctor.facts import FRAMEWORKS
from sirtaki.runner.doctor.findings import Finding, Picture, judge
from sirtaki.runner.doctor.gathering import Choice, Trial
from sirtaki.runner.doctor.report import as_json, as_lines, exit_code, print_lines
from sirtaki.runner.doctor.rules import RULES
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.hosts import Host, allocate
from sirtaki.runner.options import OptionParser, add_options_for_hosts, whole_number
from sirtaki.runner.rendezvous.interfaces import VARIABLE as INTERFACES
from sirtaki.runner.ssh import SshOptions
from sirtaki.runner.terminal_status import terminal_status

_DESCRIPTION = (
    "Looks for what a job needs on this host, or on the hosts of -H or --hostfile and between them, and "
    "prints a line with a remedy for each finding. With -np, -H, --hostfile or --frameworks, a job of two "
    "ranks tries each framework; otherwise no framework is imported. Exits with 0 if all is well, 1 if there "
    "is a problem, 2 if it could not run."
)


def main(arguments: Sequence[str]) -> int:
    """Runs the doctor and returns its exit code. Raises LaunchError if it cannot."""
    options = _parser().parse_args(arguments)
    choice = _choice(options)
    if options.network_interfaces:  # the gatherers read it where ranks do
        os.environ[INTERFACES] = ",".join(options.network_interfaces)
    if options.facts:
        from sirtaki.runner.doctor.answering import answer_questions

        return answer_questions(choice)
    hosts = _hosts(options)
    identity = options.ssh_identity_file and options.ssh_identity_file.absolute()
    with terminal_status("looking") as note:
        picture = examine(
            hosts,
            options.size,
            SshOptions(options.ssh_port, identity),
            choice,
            lambda text: note(f"looking at {text}"),
        )
    findings = judge(picture, RULES)
    if options.report is not None:
        _write_report(options.report, picture, findings)
    if options.json:
        print(as_json(picture, findings))
    else:
        print_lines(as_lines(picture, findings))
    return exit_code(findings)


def _parser() -> OptionParser:
    usage = "sirtaki doctor [-np N] [-H HOST:SLOTS,… | --hostfile FILE] [options]"
    parser = OptionParser(prog="sirtaki doctor", usage=usage, description=_DESCRIPTION, allow_abbrev=False)
    parser.example = "for example: sirtaki doctor -np 2"
    add = parser.add_argument
    add("-np", "-n", "--num-proc", dest="size", metavar="N", type=whole_number, help="ranks of the job")
    add_options_for_hosts(parser)
    add(
        "--frameworks",
        metavar="NAME,…",
        help=f"the frameworks to try (of {','.join(FRAMEWORKS)})",
    )
    add("--quick", action="store_true", help="import frameworks, but run no jobs of two ranks")
    add("--json", action="store_true", help="print all facts and findings as JSON")
    add("--report", metavar="FILE", type=Path, help="also write the text for a bug report to FILE")
    add("--facts", action="store_true", help=argparse.SUPPRESS)  # how a doctor starts one on another host
    return parser


def _choice(options: argparse.Namespace) -> Choice:
    """Returns the frameworks and their trial: none unless an option asks for it, because imports are slow."""
    frameworks = FRAMEWORKS if options.frameworks is None else _frameworks(options.frameworks)
    if options.quick:
        return Choice(frameworks, Trial.IMPORT)
    requests = (options.size, options.hosts, options.hostfile, options.frameworks)
    return Choice(frameworks, Trial.JOB if any(request is not None for request in requests) else Trial.NONE)


def _frameworks(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in FRAMEWORKS:
            raise LaunchError(f"there is no framework {name!r}: --frameworks takes {', '.join(FRAMEWORKS)}")
    return names


def _hosts(options: argparse.Namespace) -> list[Host]:
    """Returns the hosts to examine. Raises LaunchError if they cannot have so many ranks."""
    if options.hosts is None and options.hostfile is None:
        return [Host(OWN, options.size or 1)]
    if options.launcher != "ssh":
        raise LaunchError(
            "hosts are reached over ssh, not with --launcher srun: run the doctor on each node instead, for "
            "example with `srun --ntasks-per-node=1 sirtaki doctor`"
        )
    hosts, notices = named_hosts(options)
    for notice in notices:
        print(f"sirtaki doctor: {notice}", file=sys.stderr)
    if all(host.slots for host in hosts):
        allocate(hosts, options.size)
    return hosts


def _write_report(path: Path, picture: Picture, findings: Sequence[Finding]) -> None:
    text = "\n".join(as_lines(picture, findings, with_variables=True)) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(path, flags, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)  # of a file that was there before, too
            file.write(text)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}") from None
