"""A rendezvous with ranks of this host and of others, behind collectors, in one process, for tests."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hypothesis import strategies as st
from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.connection.address import is_unix, split_address, unix_path
from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.bindings.bootstrap.job import Identity, Job
from sirtaki.bindings.bootstrap.messages import RankEvent
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server.rendezvous_collector import RendezvousCollector
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

JOB = Job("job", 6, b"k" * 32, "1.0")
GARBAGE = st.binary(min_size=1, max_size=300) | st.builds(
    lambda *fields: Frame(*fields).pack(),
    st.sampled_from([kind for kind in MessageKind if kind.limit >= 80]),
    st.integers(-1, 3),
    st.binary(max_size=80),
    st.integers(0, 4),
)
EACH = 2  # ranks of a host
_names = itertools.count()


def collector_of(
    server: str, job: Job = JOB, start_timeout: float = FAILSAFE_SECONDS, ranks: int = EACH
) -> tuple[RendezvousCollector, list[str]]:
    """Returns a collector that is not running, and the lines that it will have written."""
    lines: list[str] = []
    address = f"unix:@sirtaki-test-collector-{os.getpid()}-{next(_names)}"
    return RendezvousCollector(address, job, server, ranks, start_timeout, lines.append), lines


class CollectedHosts:
    """A running server, and running collectors of all hosts but the first, whose ranks connect directly.

    All ranks of a job without room for two hosts connect directly. `via` returns the address at which
    collectors reach that of the server.
    """

    def __init__(
        self,
        job: Job = JOB,
        start_timeout: float = FAILSAFE_SECONDS,
        server: str = "127.0.0.1:0",
        via: Callable[[str], str] = str,
        **options: Any,
    ) -> None:
        self.job = job
        self.events: list[RankEvent] = []
        self._heard = threading.Condition()
        others = job.size // EACH - 1
        options = {"accepts_collectors": others > 0, **options}
        self.server = RendezvousServer(server, job, start_timeout, self._hear, **options).start()
        self.lines: list[list[str]] = []
        self.collectors: list[RendezvousCollector] = []
        for _ in range(others):
            collector, lines = collector_of(via(self.server.address), job, start_timeout)
            self.collectors.append(collector.start())
            self.lines.append(lines)
        self.clients: list[RendezvousClient] = []
        # A rank that has gone is missing in all earlier generations, too: each test takes the next.
        self.generations = itertools.count(100)
        self._pool = ThreadPoolExecutor(2 * job.size)

    def _hear(self, event: RankEvent) -> None:
        with self._heard:
            self.events.append(event)
            self._heard.notify_all()

    def wait_for(self, kind: str, count: int = 1) -> list[RankEvent]:
        def found() -> list[RankEvent]:
            return [event for event in self.events if event.kind == kind]

        with self._heard:
            assert self._heard.wait_for(lambda: len(found()) >= count, FAILSAFE_SECONDS), self.events
        return found()

    def address(self, host: int) -> str:
        """Returns the address to which the ranks of a host connect; host 0 has no collector."""
        return self.collectors[host - 1].address if host and self.collectors else self.server.address

    def visit(self, host: int = 0) -> socket.socket:
        """Returns a connection from a process that has sent nothing yet."""
        address = self.address(host)
        if not is_unix(address):
            return socket.create_connection(split_address(address), FAILSAFE_SECONDS)
        visitor = socket.socket(socket.AF_UNIX)
        visitor.connect(unix_path(address))
        return visitor

    def connect(
        self,
        rank: int,
        generation: int = 1,
        channel: int = 0,
        host: int | None = None,
        job: Job | None = None,
    ) -> RendezvousClient:
        """Connects a rank as on its host, or as on another host, or as a rank of another job."""
        address = self.address(rank // EACH if host is None else host)
        mine = Identity(rank, generation, channel)
        client = RendezvousClient.connect(address, job or self.job, mine, FAILSAFE_SECONDS)
        self.clients.append(client)
        return client

    def all(self, generation: int = 1, without: Sequence[int] = ()) -> list[RendezvousClient]:
        return [self.connect(rank, generation) for rank in range(self.job.size) if rank not in without]

    def gather(self, client: RendezvousClient, payload: bytes = b"") -> Future[list[bytes]]:
        return self._pool.submit(client.all_gather, payload)

    def gather_all(self, clients: Sequence[RendezvousClient], payloads: Sequence[bytes]) -> list[list[bytes]]:
        """Returns what each client receives."""
        answers = [self.gather(*pair) for pair in zip(clients, payloads, strict=True)]
        return [answer.result(FAILSAFE_SECONDS) for answer in answers]

    def works(self) -> bool:
        """Returns whether a whole job is still served, in a generation of its own."""
        payloads = [b"%d" % rank for rank in range(self.job.size)]
        clients = self.all(next(self.generations))
        answers = self.gather_all(clients, payloads)
        for client in clients:
            client.close()
        return answers == [payloads] * self.job.size

    def close(self) -> None:
        self.server.close()
        for collector in self.collectors:
            collector.close()
        for client in self.clients:
            client.close()
        self._pool.shutdown()


Start = Callable[..., CollectedHosts]  # starts hosts with these options
