"""Runs a job with one rank on each host: it shows what the examination of single connections cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from sirtaki.runner.doctor.facts import HostFacts, JobFacts, LinkFacts
from sirtaki.runner.doctor.trials import run_job
from sirtaki.runner.rendezvous.interfaces import chosen_interfaces
from sirtaki.runner.ssh import SshOptions

_START_SECONDS = 60


def try_job(
    names: Sequence[str], hosts: Mapping[str, HostFacts], ssh: SshOptions, note: Callable[[str], None]
) -> JobFacts | None:
    """All-reduces with one rank on each of these hosts, with a framework that works on all of them.

    Returns None if there is no such framework.
    """
    working = [_working(hosts[name]) for name in names]
    framework = next((one for one in working[0] if all(one in others for others in working)), "")
    if not framework:
        return None
    note(f"a job of {len(names)} ranks")
    options = [*ssh.arguments(), "--start-timeout", str(_START_SECONDS)]
    if interfaces := chosen_interfaces():
        options += ["--network-interfaces", ",".join(interfaces)]
    failure = run_job(framework, ["-H", ",".join(map(_with_one_slot, names)), *options])
    return JobFacts(framework, len(names), os.getcwd(), sys.executable, failure)


def _working(facts: HostFacts) -> list[str]:
    return [one.name for one in facts.frameworks or () if one.state == "works"]


def _with_one_slot(name: str) -> str:
    """Formats a host as --hosts takes it: an IPv6 address in brackets."""
    user, at, host = name.rpartition("@")
    return f"{user}{at}[{host}]:1" if ":" in host else f"{name}:1"


def all_open(links: Sequence[LinkFacts]) -> bool:
    """Returns whether each connection that was tried is open: otherwise a job can only repeat that."""
    return all(link.open is not None and not (link.speed and link.speed.stalled) for link in links)
