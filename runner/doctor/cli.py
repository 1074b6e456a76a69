"""The command line of `sirtaki doctor`."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from sirtaki.bindings.bootstrap.connection.address import VARIABLE as INTERFACES
from sirtaki.bindings.bootstrap.connection.address import chosen_interfaces
from sirtaki.runner.cli.command import module_words, terminal_status
from sirtaki.runner.cli.hvdrun import named_hosts
from sirtaki.runner.cli.options import OptionParser, add_options_for_hosts, known_names, whole_number
from sirtaki.runner.doctor.decoding import MAX_ADDRESSES, decode, line
from sirtaki.runner.doctor.facts import (
    FRAMEWORKS,
    Attempt,
    ClockOffset,
    HostFacts,
    JobFacts,
    LinkFacts,
    Speed,
)
from sirtaki.runner.doctor.findings import Finding, Picture, judge
from sirtaki.runner.doctor.gathering import Choice, Trial, gather, run_job
from sirtaki.runner.doctor.probe import TOKEN_BYTES
from sirtaki.runner.doctor.report import as_json, as_lines, exit_code, print_lines
from sirtaki.runner.doctor.rules import RULES
from sirtaki.runner.doctor.session import DoctorRoute, Session, SessionError
from sirtaki.runner.hosts.ssh import SshOptions, StartFailure, diagnose, ssh_command
from sirtaki.runner.launch.errors import LaunchError, explained
from sirtaki.runner.launch.hosts import Host, allocate, is_own_host, needed

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
        from sirtaki.runner.doctor.gathering import answer_questions

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
    frameworks: Sequence[str] = FRAMEWORKS
    if options.frameworks is not None:
        frameworks = known_names(options.frameworks, FRAMEWORKS, "framework", "--frameworks")
    if options.quick:
        return Choice(frameworks, Trial.IMPORT)
    requests = (options.size, options.hosts, options.hostfile, options.frameworks)
    return Choice(frameworks, Trial.JOB if any(request is not None for request in requests) else Trial.NONE)


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
    with explained(f"cannot write {path}"), open(os.open(path, flags, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)  # of a file that was there before, too
        file.write(text)


# ---- Examines all hosts of a job and the connections between them --------------------------------------


OWN = "localhost"
_CONNECT_SECONDS = 3.0  # TCP repeats its first packet after one second, and after three
_ASK_SECONDS = 30.0
_CLOCK_QUESTIONS = 5
_MEASURE_ALL = 4  # with more hosts, each is measured beside the next one only
_TRY_ALL = 16  # with more, each is tried beside the next one, and beside the first
_MAX_PORT = 65535
Note = Callable[[str], None]


@dataclass(frozen=True)
class Door:
    """A host's listener: its port, and its addresses, not all of them reachable from everywhere."""

    port: int
    addresses: tuple[str, ...]


def examine(hosts: Sequence[Host], size: int | None, ssh: SshOptions, choice: Choice, note: Note) -> Picture:
    """Examines the hosts of a job of this size (None: all slots), and this host in any case.

    Raises LaunchError if there are too few slots.
    """
    hosts = needed(hosts, size)
    if all(is_own_host(host.name) for host in hosts):
        own = {OWN: gather(choice, note)}
        return Picture(own, _count_ranks(hosts, size, own))
    names = [host.name for host in hosts]
    with contextlib.ExitStack() as cleanup:
        sessions = []
        for name, route in _routes(names, ssh, choice).items():
            sessions.append(Session(name, route))
            cleanup.callback(sessions[-1].close)
        with ThreadPoolExecutor(len(sessions)) as pool:
            results = dict(pool.map(lambda session: (session.host, _facts(session, note)), sessions))
        found = {name: facts for name, facts in results.items() if isinstance(facts, HostFacts)}
        failures = {name: result for name, result in results.items() if isinstance(result, StartFailure)}
        ranks = {OWN: 0, **_count_ranks(hosts, size, found)}
        alive = [session for session in sessions if session.host in found]
        clocks = {session.host: offset for session in alive if (offset := _clock_offset(session)) is not None}
        links = _examine_links(_distinct(alive, found), note)
    is_possible = all(name in found for name in names) and all_open(links)
    job = try_job(names, found, ssh, note) if is_possible and choice.trial is Trial.JOB else None
    return Picture(found, ranks, failures, links, clocks, job)


def _count_ranks(hosts: Sequence[Host], size: int | None, found: Mapping[str, HostFacts]) -> dict[str, int]:
    """Returns the number of ranks of each host; without a slot count, 1 per GPU, or 1, as in hvdrun."""
    counted = []
    for host in hosts:
        facts = found.get(host.name)
        gpus = facts.gpu.devices if facts is not None and facts.gpu is not None else 0
        counted.append(Host(host.name, host.slots or max(1, gpus)))
    return {allocation.host.name: len(allocation.ranks) for allocation in allocate(counted, size)}


def _distinct(sessions: Sequence[Session], hosts: Mapping[str, HostFacts]) -> list[Session]:
    """Returns a session per machine: a host that is named twice has no link to itself."""
    found: dict[object, Session] = {}
    for session in sessions:
        found.setdefault(hosts[session.host].identity or session.host, session)
    return list(found.values())


def _facts(session: Session, note: Note) -> HostFacts | StartFailure:
    return session.facts(lambda text: note(f"{session.host}: {text}"))


def _routes(names: Sequence[str], ssh: SshOptions, choice: Choice) -> dict[str, DoctorRoute]:
    """Returns the route to this host and each named host; only to this host if there is no ssh."""
    path = shutil.which(ssh.program)
    # No rank runs on a host that only launches, so frameworks do not matter there.
    routes = {OWN: _route(OWN, "", ssh, choice if OWN in names else Choice((), Trial.NONE))}
    for name in names:
        if name != OWN and path is not None:
            routes[name] = _route(name, path, ssh, choice)
    return routes


def _route(host: str, ssh_path: str, ssh: SshOptions, choice: Choice) -> DoctorRoute:
    frameworks = ["--frameworks", ",".join(choice.frameworks)]
    words = [*module_words("sirtaki"), "doctor", "--facts", *frameworks]
    words += ["--quick"] if choice.trial is Trial.IMPORT else []
    if interfaces := chosen_interfaces():
        words += ["--network-interfaces", ",".join(interfaces)]
    if is_own_host(host):
        return DoctorRoute([sys.executable, *words], "sirtaki doctor", _explain_own)
    command = ssh_command(ssh_path, host, ssh, words=words)
    return DoctorRoute(command, ssh.trial(host), lambda code, output: diagnose(host, ssh, code, output))


def _explain_own(code: int, output: Sequence[str]) -> StartFailure:
    what = f"the doctor's own process ended with exit code {code}"
    return StartFailure(
        "command-failed", what, "run `sirtaki doctor` without hosts", line("; ".join(output[-1:]))
    )


def _clock_offset(session: Session) -> ClockOffset | None:
    """Returns the offset of a host's clock, from the fastest of several questions."""
    found: list[ClockOffset] = []
    for _ in range(_CLOCK_QUESTIONS):
        begin = time.time()
        try:
            answer = session.ask({"ask": "clock"}, _ASK_SECONDS)
        except SessionError:
            return None
        end = time.time()
        if not isinstance(answer, float):
            return None
        found.append(ClockOffset(answer - (begin + end) / 2, (end - begin) / 2))
    return min(found, key=lambda clock: clock.error)


def _examine_links(sessions: Sequence[Session], note: Note) -> tuple[LinkFacts, ...]:
    if len(sessions) < 2:
        return ()
    token = secrets.token_hex(TOKEN_BYTES)
    doors = {session.host: _open_door(session, token) for session in sessions}
    by_host = {session.host: session for session in sessions}
    pairs = _pairs([session.host for session in sessions], _TRY_ALL)
    note("connections")
    with ThreadPoolExecutor(len(sessions)) as pool:  # a session answers one question at a time
        each = pool.map(
            lambda session: [
                _try(session, target, doors[target], token) for own, target in pairs if own == session.host
            ],
            sessions,
        )
        links = [link for found in each for link in found]
    measured = set(_pairs([session.host for session in sessions], _MEASURE_ALL))
    for index, link in enumerate(links):
        if link.open is not None and (link.source, link.target) in measured:
            note(f"{link.source} to {link.target}")
            links[index] = _measure(by_host[link.source], link, doors[link.target], token)
    return tuple(links)


def _pairs(hosts: Sequence[str], limit: int) -> list[tuple[str, str]]:
    """Returns ordered pairs of hosts: all pairs up to `limit` hosts, else a selection.

    The selection consists of the pairs of hosts next to each other, and the pairs with the first host.
    """
    if len(hosts) <= limit:
        return [(host, other) for host in hosts for other in hosts if host != other]
    near = [(host, hosts[(index + 1) % len(hosts)]) for index, host in enumerate(hosts)]
    first = [pair for host in hosts[1:] for pair in ((host, hosts[0]), (hosts[0], host))]
    return list(dict.fromkeys([*near, *first]))


def _open_door(session: Session, token: str) -> Door | str:
    """Has a host listen; returns where, or why it does not."""
    try:
        door = decode(Door, session.ask({"ask": "listen", "token": token}, _ASK_SECONDS))
        for address in door.addresses:
            ipaddress.ip_address(address)
    except (SessionError, ValueError) as error:
        return line(error)
    if not 0 < door.port <= _MAX_PORT or len(door.addresses) > MAX_ADDRESSES:
        return f"{session.host} has sent a malformed address"
    return door if door.addresses else f"{session.host} has only loopback addresses"


def _try(session: Session, target: str, door: Door | str, token: str) -> LinkFacts:
    if isinstance(door, str):
        return LinkFacts(session.host, target, failure=door)
    question = {"ask": "reach", "seconds": _CONNECT_SECONDS, "token": token, **asdict(door)}
    try:
        attempts = decode(tuple[Attempt, ...], session.ask(question, _ASK_SECONDS), MAX_ADDRESSES)
    except (SessionError, ValueError) as error:
        return LinkFacts(session.host, target, failure=line(error))
    failure = "" if attempts else "both have the same addresses"
    return LinkFacts(session.host, target, attempts, failure=failure)


def _measure(session: Session, link: LinkFacts, door: Door | str, token: str) -> LinkFacts:
    assert link.open is not None
    assert isinstance(door, Door)
    question = {"ask": "measure", "token": token, "port": door.port, "address": link.open.address}
    try:
        speed = decode(Speed, session.ask(question, _ASK_SECONDS))
        return LinkFacts(link.source, link.target, link.attempts, speed)
    except (SessionError, ValueError) as error:
        return LinkFacts(link.source, link.target, link.attempts, failure=line(error))


# ---- A job with one rank on each host ------------------------------------------------------------------

# It shows what the examination of single connections cannot.


_START_SECONDS = 60


def try_job(
    names: Sequence[str], hosts: Mapping[str, HostFacts], ssh: SshOptions, note: Callable[[str], None]
) -> JobFacts | None:
    """Runs an all-reduce with a rank per host, in a framework that works on all hosts.

    Returns None if there is no such framework.
    """
    working = [_working(hosts[name]) for name in names]
    framework = next((name for name in working[0] if all(name in others for others in working)), "")
    if not framework:
        return None
    note(f"a job of {len(names)} ranks")
    options = [*ssh.arguments(), "--start-timeout", str(_START_SECONDS)]
    if interfaces := chosen_interfaces():
        options += ["--network-interfaces", ",".join(interfaces)]
    failure = run_job(framework, ["-H", ",".join(map(_with_one_slot, names)), *options])
    return JobFacts(framework, len(names), os.getcwd(), sys.executable, failure)


def _working(facts: HostFacts) -> list[str]:
    return [framework.name for framework in facts.frameworks or () if framework.state == "works"]


def _with_one_slot(name: str) -> str:
    """Formats a host as --hosts takes it: an IPv6 address in brackets."""
    user, at, host = name.rpartition("@")
    return f"{user}{at}[{host}]:1" if ":" in host else f"{name}:1"


def all_open(links: Sequence[LinkFacts]) -> bool:
    """Returns whether each connection that was tried is open: otherwise a job can only repeat that."""
    return all(link.open is not None and not (link.speed and link.speed.stalled) for link in links)
