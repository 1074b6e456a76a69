"""The doctor's output: lines of facts and findings as text, and the same as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.runner.doctor.cluster_rules import card_speed
from sirtaki.runner.doctor.decoding import redact, redact_all
from sirtaki.runner.doctor.facts import HostFacts, LinkFacts
from sirtaki.runner.doctor.findings import LEVELS, NOTE, PROBLEM, WARNING, Finding, Picture

SCHEMA = 1
_COLOURS = {PROBLEM: "bold red", WARNING: "yellow", NOTE: "cyan"}
_GIBIBYTE = 1 << 30
_MAX_LINE = 4000


def exit_code(findings: Sequence[Finding]) -> int:
    return 1 if any(finding.level == PROBLEM for finding in findings) else 0


def as_json(picture: Picture, findings: Sequence[Finding]) -> str:
    """Returns all facts and findings as a JSON object; `schema` changes when a field changes its meaning."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "exit_code": exit_code(findings),
        **asdict(picture),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(redact_all(values), indent=2)


def as_lines(picture: Picture, findings: Sequence[Finding], with_variables: bool = False) -> list[str]:
    """Returns the text; `with_variables` adds the variables that concern sirtaki, for a bug report."""
    lines = [f"sirtaki {VERSION}"]
    for host, facts in picture.hosts.items():
        lines += ["", host, *(f"  {name:<12} {text}" for name, text in _describe(facts))]
        if with_variables and facts.variables is not None:
            lines += [f"  {name}={value}" for name, value in sorted(facts.variables.values.items())]
    if picture.links:
        lines += ["", "connections", *(f"  {_describe_link(picture, link)}" for link in picture.links)]
    if picture.job is not None:
        job = picture.job
        result = f"fails: {job.failure}" if job.failure else "works"
        lines.append(f"  an all-reduce of {job.ranks} ranks with {job.framework}, one on each host: {result}")
    lines += _untried(picture)
    lines += ["", *map(str, findings), *([""] if findings else []), summary(findings)]
    return [redact(printable(line.replace("\n", " "), _MAX_LINE)) for line in lines]


def print_lines(lines: Sequence[str]) -> None:
    """Prints lines, with the levels in colours on a terminal."""
    if not sys.stdout.isatty():
        print("\n".join(lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        text = Text(line)
        level = line.partition(":")[0]
        if level in _COLOURS:
            text.stylize(_COLOURS[level], 0, len(level))
        console.print(text, soft_wrap=True)


def summary(findings: Sequence[Finding]) -> str:
    """Formats "1 problem, 2 warnings"."""
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    parts = [f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count]
    return ", ".join(parts) or "nothing was found that needs attention"


def _untried(picture: Picture) -> list[str]:
    """Returns a line about frameworks that nothing has tried, and the command that tries them; [] if none."""
    each = [framework for _, frameworks in picture.each("frameworks") for framework in frameworks]
    names = dict.fromkeys(framework.name for framework in each if framework.state == "installed")
    text = f"not tried: {', '.join(names)}: `sirtaki doctor -np 2` runs a job of two ranks with each"
    return ["", text] if names else []


def _describe(facts: HostFacts) -> Iterator[tuple[str, str]]:
    yield from _describe_software(facts)
    yield from _describe_machine(facts)
    network = facts.network
    if network is not None:
        interface = network.interface_of(network.source)
        route = f"{network.source} on {network.route}" if network.route else "no default route"
        mtu = f", MTU {interface.mtu}" if interface else ""
        speed = f", {interface.speed} Mbit/s" if interface and interface.speed else ""
        yield "network", f"{network.hostname}; {route}{mtu}{speed}"
        yield "reached at", ", ".join(network.reachable_at) or f"no address: {network.refusal}"
    if facts.ssh is not None:
        key = "with a key" if facts.ssh.has_key else "no key in ~/.ssh and no agent"
        yield "ssh", f"{facts.ssh.version}, {key}" if facts.ssh.path else "not on the PATH"
    if facts.gpu is not None:
        gpu = facts.gpu
        yield "GPUs", f"{gpu.devices}" + (f"; driver {gpu.driver}" if gpu.driver else "")
        has = f"; it has {', '.join(gpu.symbols)}" if gpu.symbols else ""
        for name, library, addition in (("CUDA", gpu.cuda, ""), ("NCCL", gpu.nccl, has)):
            if gpu.devices or library.works:
                yield name, f"{library.text}{addition}"


def _describe_software(facts: HostFacts) -> Iterator[tuple[str, str]]:
    installed = facts.installation
    if installed is not None:
        yield "system", f"{installed.system} on {installed.machine}"
        yield "Python", f"{installed.python} in {installed.executable}"
        yield "core", f"no: {installed.broken}" if installed.broken else f"works: {installed.core}"
    meanings = {
        "works": "works: a job of two ranks has all-reduced",
        "installed": "is installed; nothing has tried it",
        "imports": "can be imported; no job has tried it",
        "unsupported": "no: sirtaki does not support this version",
        "no-import": "no: it cannot be imported",
        "no-job": "no: its job of two ranks has failed",
    }
    for framework in facts.frameworks or ():
        if framework.state != "absent":
            yield framework.name, f"{framework.version} {meanings.get(framework.state, framework.state)}"


def _describe_machine(facts: HostFacts) -> Iterator[tuple[str, str]]:
    if facts.cores is not None:
        cores = facts.cores
        quota = f", a quota of {cores.quota:g}" if cores.quota else ""
        yield "cores", f"{cores.usable} usable of {cores.total}{quota}"
    if facts.memory is not None:
        memory = facts.memory
        limit = " (a control group's limit)" if 0 < memory.total < memory.machine else ""
        yield "memory", f"{_size(memory.available)} available of {_size(memory.total)}{limit}"
    if facts.kernel is not None:
        kernel = facts.kernel
        calls = {
            "memfd": kernel.memfd,
            "pidfd": kernel.pidfd,
            "shared memory": kernel.shared_memory,
        }
        each = [f"{name} no: {reason}" if reason else f"{name} works" for name, reason in calls.items()]
        mode = {0: "no seccomp", 1: "seccomp is strict", 2: "seccomp filters"}.get(kernel.seccomp, "")
        yield "kernel", ", ".join(filter(None, (*each, mode)))
    if facts.limits is not None:
        limits = facts.limits
        locked = "unlimited" if limits.locked < 0 else f"{limits.locked // 1024} KiB"
        hard = limits.open_files_hard
        files = f"{limits.open_files} open files (at most {'unlimited' if hard < 0 else hard})"
        yield "limits", f"{files}, {locked} of locked memory"


def _size(count: int) -> str:
    return f"{count / _GIBIBYTE:.1f} GiB"


def _describe_link(picture: Picture, link: LinkFacts) -> str:
    name = f"{link.source} -> {link.target}"
    attempt = link.open
    if attempt is None:
        each = ", ".join(f"{attempt.address} {attempt.state}" for attempt in link.attempts)
        return f"{name}: {link.failure or each}"
    text = f"{name}: {attempt.address}, MTU {attempt.mtu}"
    if link.speed is None:
        return f"{text}, not measured"
    speed = link.speed
    rates = f"{_rate(speed.one_stream)} in one stream, {_rate(speed.several_streams)} in {speed.streams}"
    card = card_speed(picture, link)
    of_card = f" (card: {card / 1000:g} Gbit/s)" if card else ""
    return f"{text}, {speed.round_trip:.0f} µs, {rates}{of_card}"


def _rate(rate: float) -> str:
    return f"{rate * 8 / 1e9:.2f} Gbit/s"
