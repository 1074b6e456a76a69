"""The settings of an elastic job, from hvdrun's options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sirtaki.runner.elastic.arbiter.model import LOST, RANK, Rules, Slot
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import Host

_TIMEOUT, _COOLDOWN = 600.0, (1.0, 60.0)  # seconds; docs/guide/elastic.md


@dataclass(frozen=True)
class ElasticSettings:
    """The settings that other jobs lack. `hosts` are empty if a `script` finds them."""

    rules: Rules
    hosts: Sequence[Host]
    script: Path | None
    slots_per_host: int | None
    spares: int = 0
    spares_run_script: bool = False


def elastic_settings(options: argparse.Namespace) -> Callable[[Sequence[Host]], ElasticSettings]:
    """Checks the options; returns a function from the job's hosts to its settings. Raises LaunchError."""
    script: Path | None = options.host_discovery_script
    if script is not None and (options.hosts is not None or options.hostfile is not None):
        raise LaunchError("--host-discovery-script finds the hosts: leave out --hosts and --hostfile")
    minimum, maximum = options.min_np, options.max_np
    start = options.size or minimum
    if start is None:
        raise LaunchError("the number of ranks to start with is missing: give it with -np")
    minimum, maximum = minimum or start, maximum or max(start, minimum or 0)
    if not minimum <= start <= maximum:
        raise LaunchError(
            f"-np is {start}, but it has to be from --min-np ({minimum}) to --max-np ({maximum})"
        )
    cooldown = tuple(options.blacklist_cooldown_range or _COOLDOWN)
    if cooldown[0] > cooldown[1]:
        raise LaunchError(
            f"--blacklist-cooldown-range takes the shorter pause first, not {cooldown[0]:g} {cooldown[1]:g}"
        )
    rules = Rules(
        start,
        minimum,
        maximum,
        options.elastic_timeout or _TIMEOUT,
        options.reset_limit,
        (cooldown[0], cooldown[1]),
        options.elastic_survive or LOST,
        options.elastic_failure_domain or RANK,
    )
    if options.spares_run_script and not options.spares:
        raise LaunchError("--spares-run-script says how far spares go: give their number with --spares")
    path = script and _checked(script)
    spares, run_script = options.spares or 0, bool(options.spares_run_script)

    def settings(hosts: Sequence[Host]) -> ElasticSettings:
        named = options.hosts is not None or options.hostfile is not None
        given = hosts if named else [Host("localhost", maximum)]
        return ElasticSettings(rules, [] if path else given, path, options.slots_per_host, spares, run_script)

    return settings


def slots_of(hosts: Sequence[Host], per_host: int = 1) -> list[Slot]:
    """Returns the slots of hosts; a host without a number has `per_host` slots."""
    return [Slot(host.name, index) for host in hosts for index in range(host.slots or per_host)]


def _checked(script: Path) -> Path:
    path = script.absolute()
    if not path.is_file():
        raise LaunchError(f"--host-discovery-script: there is no file {script}")
    if not os.access(path, os.X_OK):
        raise LaunchError(f"--host-discovery-script: {script} is not executable: run `chmod +x {script}`")
    return path
