"""Reaches the other hosts of an elastic job, and prepares their agents for workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sirtaki.runner.elastic.host_spares import SpareNews
from sirtaki.runner.elastic.post import Post
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.host_connection import Connection, with_slot_counts
from sirtaki.runner.hosts import Host
from sirtaki.runner.launch import Settings, start_values
from sirtaki.runner.lease import HostLease, lease_clock
from sirtaki.runner.reaper import Reaper
from sirtaki.runner.remote import RemoteHost, RemoteJob
from sirtaki.runner.rendezvous.job import Job, RendezvousError
from sirtaki.runner.signals import WakeupPipe


@dataclass(frozen=True)
class HostStart:
    """The way to other hosts.

    `on_start` is called with a worker's lane and its pid there, `spares` for the spares of all hosts.
    """

    settings: Settings
    job: Job
    post: Post
    connection: Connection
    wakeup: WakeupPipe
    reaper: Reaper
    on_start: Callable[[int, int], None]
    spares: SpareNews
    states: Path  # the folder of the states of this host's workers

    def connect(self, hosts: Sequence[Host]) -> tuple[list[RemoteHost], list[Host]]:
        """Reaches all hosts, and returns the connections, and the hosts with their numbers of slots.

        Raises LaunchError if one cannot take part.
        """
        program = self.settings.command[0]
        remotes = self.connection.connect(hosts, program, self.wakeup, self.reaper)
        if all(host.slots for host in hosts):
            return remotes, list(hosts)
        from sirtaki.runner.cores import count_gpus

        return remotes, with_slot_counts(hosts, remotes, count_gpus())

    def begin(self, name: str) -> RemoteHost:
        """Queries a host, and returns at once. Raises LaunchError."""
        return self.connection.begin(name, self.settings.command[0], self.reaper)

    def prepare(self, remote: RemoteHost, slots: int) -> None:
        """Prepares a host that has answered for this number of workers. Raises LaunchError."""
        try:
            address = self.post.address_for_others()
        except RendezvousError as error:
            raise LaunchError(str(error), 1) from None
        lease = self._lease_seconds()
        values = start_values(self.settings, self.job, address)
        values |= {"placements": [], "slots": slots, "lease": lease}
        timeline, hosts_lease = self.settings.timeline, HostLease(lease, lease_clock())
        wake = self.wakeup.wake
        job = RemoteJob({}, None, self.on_start, wake, timeline, hosts_lease, self.spares, self.states)
        remote.start(values, job)

    def _lease_seconds(self) -> float:
        """Returns the length of a lease: the time for which ranks let each other's machines be silent."""
        from sirtaki.bindings import variables  # opens the core
        from sirtaki.bindings.config import Config

        values = variables.values({**os.environ, **self.settings.additions})
        return float(Config(values).get("heartbeat"))
