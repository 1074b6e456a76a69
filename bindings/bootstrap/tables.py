"""The worlds in which the ranks of a job share a table with the servers that hvdrun has started beside them.

Each table has a world of its own: the ranks, with their numbers, then the servers. hvdrun runs a rendezvous
for these worlds beside that of the ranks, and tells each server of every table whose ranks arrive there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.bindings.bootstrap.job import (
    SERVER,
    SERVERS,
    SIZE,
    TABLES,
    Identity,
    Job,
    RendezvousError,
    RendezvousTimeout,
    job_of_tables,
)
from sirtaki.bindings.bootstrap.lifecycle import encrypted
from sirtaki.bindings.bootstrap.providers.environment import key_of_launcher
from sirtaki.bindings.bootstrap.providers.world import World, number_in, start_timeout
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.world_builder import WorldBuilder
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import Config
from sirtaki.bindings.variables import values

# Files that describe a rank, of which its own world writes one.
_NO_FILES = {"dump_directory": "", "stall_report_file": ""}
_PATIENCE = 2e6  # seconds for a message, the longest that poll(2) takes: hvdrun ends servers that wait


def count_servers(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of servers of this job."""
    return number_in(environment, SERVERS) if SERVERS in environment else 0


def enter_table(member: int, table: int) -> Context:
    """Makes this process a member of a table's world, and returns its context. All members must call it.

    `table` is the number of the table, from 1.

    Raises:
        RendezvousTimeout: a member did not arrive in time.
        RendezvousError: another one failed.
    """
    config = Config({**values(), **_NO_FILES})
    world, mine = _world(member, config), Identity(member, table)
    client = RendezvousClient.connect(world.address, world.job, mine, world.start_timeout)
    with contextlib.closing(client):
        context = WorldBuilder(world, table, client, config, _role_of(os.environ)).run()
        client.report("finished")
    return context


class TableNews:
    """A server's connection to hvdrun, which tells it of tables."""

    def __init__(self) -> None:
        """Raises RendezvousError if hvdrun cannot be reached."""
        self.member = number_in(os.environ, SIZE) + number_in(os.environ, SERVER)
        world = _world(self.member, Config(values()))
        self._client = RendezvousClient.connect(
            world.address, world.job, Identity(self.member), world.start_timeout
        )
        self._client.keep_alive()
        self._client.send_message(Frame(MessageKind.SERVES), time.monotonic() + world.start_timeout)

    def next(self) -> int:
        """Waits for the next table, and returns its number, or END.

        Raises RendezvousError if hvdrun is gone.
        """
        while True:
            with contextlib.suppress(RendezvousTimeout):  # a report shares the socket's time limit
                return self._client.receive_message(time.monotonic() + _PATIENCE).number

    def report_failure(self, reason: str) -> None:
        """Reports this server's failure to hvdrun, even while another thread waits for the next table."""
        self._client.report("aborted", reason)


def _world(member: int, config: Config) -> World:
    environment, servers = os.environ, count_servers()
    for name in ("SIRTAKI_JOB", "SIRTAKI_KEY_FILE", TABLES):
        if name not in environment:
            raise RendezvousError(f"{name} is not set, which hvdrun --servers sets")
    key_file, size = environment["SIRTAKI_KEY_FILE"], number_in(environment, SIZE)
    of_ranks = Job(environment["SIRTAKI_JOB"], size, key_of_launcher(key_file), VERSION)
    job = job_of_tables(of_ranks, servers)
    if config.get("encrypt") == "1":
        job = encrypted(job)
    timeout = start_timeout(environment)
    return World(member, job, environment[TABLES], timeout, folder=os.path.dirname(key_file))


def _role_of(environment: Mapping[str, str]) -> str:
    return f"server {environment[SERVER]}" if SERVER in environment else ""
