"""Counts what the server of the rendezvous receives and sends in one init(), with and without collectors.

Usage: python benchmarks/rendezvous.py [--hosts 2 4 8] [--each 8] [--json FILE]

The server, the collectors of all other hosts and all ranks run in one process. The ranks join, and contribute
to three all-gathers payloads of the sizes that their descriptions have in init(); then they report that they
have initialised. Without collectors each rank has its own connection to the server. Reads and writes are
calls of the operating system on connections over TCP, without the handshakes; the ranks of the server's own
host use a Unix socket in both cases.
"""

from __future__ import annotations

import socket
import threading
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any
from unittest import mock

from common.harness import Benchmark, Results
from common.options import KIB, Option, number
from common.report import Columns, Table, Target, at_most, make_table
from common.simulated_start import describe

from sirtaki.bindings.bootstrap.connection.address import unix_address
from sirtaki.bindings.bootstrap.connection.wire import HEADER
from sirtaki.bindings.bootstrap.job import Identity, Job
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server import connection_server
from sirtaki.bindings.bootstrap.server.rendezvous_collector import RendezvousCollector
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

HOSTS = [2, 4, 8]
SECONDS = 120.0


@dataclass
class Traffic:
    """One init(), over TCP."""

    hosts: int
    ranks: int
    collectors: bool
    connections: int = 0
    reads: int = 0
    received: int = 0  # bytes
    writes: int = 0
    sent: int = 0  # bytes


COLUMNS: Columns = {
    "hosts": "{hosts}",
    "ranks": "{ranks}",
    "collectors": lambda row: "yes" if row["collectors"] else "no",
    "connections": "{connections}",
    "reads": "{reads}",
    "received, KiB": lambda row: f"{row['received'] / KIB:.1f}",
    "writes": "{writes}",
    "sent, KiB": lambda row: f"{row['sent'] / KIB:.1f}",
}


class Counted:
    """A socket of the server whose reads and writes are counted."""

    def __init__(self, connection: socket.socket, row: Traffic) -> None:
        self._connection, self._row = connection, row

    def recv(self, count: int) -> bytes:
        data = self._connection.recv(count)
        self._row.reads, self._row.received = self._row.reads + 1, self._row.received + len(data)
        return data

    def send(self, data: bytes) -> int:
        sent = self._connection.send(data)
        self._row.writes, self._row.sent = self._row.writes + 1, self._row.sent + sent
        return sent


def counting(row: Traffic) -> type[connection_server.ServedConnection]:
    """Returns the class of connections that count in a row once their handshake is complete."""

    class Connection(connection_server.ServedConnection):
        is_counted = False

        @property
        def connection(self) -> Any:
            if not self.is_counted and self.socket.family == socket.AF_INET and self.is_complete:
                self.is_counted = True
                row.connections += 1
            return Counted(self.socket, row) if self.is_counted else self.socket

    return Connection


def measure(options: Namespace) -> Results:
    return {
        "rows": [
            vars(count(hosts, options.each, collectors))
            for hosts in options.hosts
            for collectors in (False, True)
        ]
    }


def count(hosts: int, each: int, collectors: bool) -> Traffic:
    """Returns what the server receives and sends in one init() of a new world."""
    ranks = hosts * each
    row = Traffic(hosts, ranks, collectors)
    payloads = [(size - HEADER.size) // ranks - 4 for size in describe(ranks, each).sizes]
    job = Job("benchmark", ranks, b"k" * 32, "0")
    with ExitStack() as opened:
        opened.enter_context(mock.patch.object(connection_server, "ServedConnection", counting(row)))
        finished = threading.Semaphore(0)
        own = unix_address(f"sirtaki-benchmark-{hosts}-{collectors}")
        server = RendezvousServer(
            f"{own},127.0.0.1:0",
            job,
            SECONDS,
            lambda event: finished.release() if event.kind == "initialised" else None,
            accepts_collectors=collectors,
        )
        opened.enter_context(server)
        own, remote = server.address.split(",")
        addresses = [own, *[remote] * (hosts - 1)]
        if collectors:
            for host in range(1, hosts):
                name = unix_address(f"sirtaki-benchmark-{hosts}-{host}")
                collector = RendezvousCollector(name, job, remote, each, SECONDS, print)
                addresses[host] = opened.enter_context(collector).address
        pool = opened.enter_context(ThreadPoolExecutor(ranks))
        clients = list(
            pool.map(lambda rank: _init(addresses[rank // each], job, rank, payloads), range(ranks))
        )
        for client in clients:
            opened.enter_context(closing(client))
            finished.acquire(timeout=SECONDS)
        return row


def _init(address: str, job: Job, rank: int, sizes: Sequence[int]) -> RendezvousClient:
    client = RendezvousClient.connect(address, job, Identity(rank, 1), SECONDS)
    for size in sizes:
        client.all_gather(bytes(size))
    client.report("initialised")
    return client


def tables(results: Results) -> list[Table]:
    return [make_table("The server in one init()", COLUMNS, results["rows"])]


def judge(results: Results) -> list[Target]:
    """Compares the bytes of the largest world: those of a rank are now those of a host."""
    direct, collected = results["rows"][-2:]
    each = direct["ranks"] // direct["hosts"]
    return [at_most("bytes sent, with collectors", 1.1 / each, collected["sent"] / direct["sent"], "×")]


OPTIONS = [
    Option("--hosts", type=int, nargs="+", default=HOSTS, help="how many (2 4 8)"),
    number("--each", 8, "ranks on each host"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
