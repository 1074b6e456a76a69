"""--dry-run: shows which ranks would run where. Starts nothing, contacts no host, shows no secrets."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from sirtaki.bindings.bootstrap.job import join_names, name_of
from sirtaki.runner.hosts.host_connection import with_slot_counts
from sirtaki.runner.launch.cores import count_gpus
from sirtaki.runner.launch.environment import exported
from sirtaki.runner.launch.hosts import allocate, is_own_host, name_range, needed, servers_of
from sirtaki.runner.launch.job import Settings


def show(settings: Settings) -> int:
    """Prints the layout and returns hvdrun's exit code. Raises LaunchError if there are too few slots."""
    for line in describe(settings):
        print(line)
    return 0


def describe(settings: Settings) -> Iterator[str]:
    hosts = needed(settings.hosts, settings.size)
    unknown = [host.name for host in hosts if host.slots is None and not is_own_host(host.name)]
    yield from settings.notices
    yield f"command: {shlex.join(settings.command)}"
    yield f"folder: {os.getcwd()}"
    for name, value in settings.additions.items():
        yield f"setting: {name}={value}"
    if settings.torch_env:
        yield "torch's variables are set: RANK, WORLD_SIZE, MASTER_ADDR and others"
    if settings.metrics is not None:
        yield f"each host with ranks serves metrics at {settings.metrics} (--metrics-port)"
    if settings.dashboard is not None:
        yield f"this host serves a page with all ranks at {settings.dashboard} (--dashboard)"
    if any(not is_own_host(host.name) for host in hosts):
        count = len(exported(os.environ))
        way = f"through {settings.launcher.program}'s input"
        yield f"{count} of this host's environment variables are sent to other hosts, {way}"
    shares = allocate(with_slot_counts(hosts, [], count_gpus()), settings.size)
    for share in shares:
        name = share.host.name
        yield f"{name}: {name_range(share.ranks)}" + (
            " (if it has no GPUs; otherwise one rank per GPU)" if name in unknown else ""
        )
        if servers := servers_of(share, shares, settings.servers):
            yield f"{name}: {join_names(map(name_of, servers))}"
        if not is_own_host(name):
            yield f"  {shlex.join(settings.launcher.command(settings.launcher.program, name))}"
