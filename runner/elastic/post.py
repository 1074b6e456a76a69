"""The connections of an elastic job: the rendezvous with all workers, and a rendezvous per generation.

They are served by the caller's main loop: hvdrun starts workers while the job runs, and a process with one
thread forks safely. Workers of this host connect over Unix sockets. The others need TCP, at which nothing
listens before there is another host.
"""

from __future__ import annotations

import contextlib
import hashlib
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from sirtaki.bindings.bootstrap.connection.address import (
    addresses_for_others,
    network_address,
    unix_addresses,
)
from sirtaki.bindings.bootstrap.connection.wire import Frame
from sirtaki.bindings.bootstrap.elastic.messages import Message, pack, unpack
from sirtaki.bindings.bootstrap.job import Job, RendezvousError, job_of_workers
from sirtaki.bindings.bootstrap.messages import RankEvent
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.runner.elastic.arbiter.model import Open, Slot
from sirtaki.runner.launch.hosts import is_own_host
from sirtaki.runner.launch.starter import reachable_server
from sirtaki.runner.supervise.failure_analysis import first_line

_ANSWER_SECONDS = 0.1  # the longest pause of the caller's orders for the connections
_START_SECONDS = 60.0  # the limit of a generation's all-gathers; its members have shorter ones of their own


class Post:
    """The connections. `on_message` receives a worker's number and its message, `on_refusal` a line."""

    def __init__(
        self,
        job: Job,
        folder: str,
        interfaces: Sequence[str],
        on_message: Callable[[int, Message], None],
        on_refusal: Callable[[str], None],
        on_call: Callable[[int, Frame], bytes] | None = None,
    ) -> None:
        """Opens the rendezvous with this host's workers; `on_call` answers their calls.

        Raises RendezvousError if that is impossible.
        """
        self._job, self._job_of_workers = job, job_of_workers(job)
        self._folder = folder
        self._interfaces = interfaces
        self._on_message = on_message
        self._on_refusal = on_refusal
        self._on_call = on_call
        self._workers: list[RendezvousServer] = []
        self._generation: RendezvousServer | None = None
        self._address_for_others = ""
        self._messages: deque[tuple[int, Frame]] = deque()  # those that were not delivered yet
        self.failed_threads: dict[str, str] = {}  # by rank: the first exception that ended one of its threads
        self.has_initialised = False  # whether a worker has called hvd.init()
        own = self._open(self._unix_addresses(self._job_of_workers.id))
        self._workers.append(own)
        self.address = own.address  # for workers of this host

    def address_for_others(self) -> str:
        """Returns the address for workers of other hosts; opens it when it is first needed.

        Raises RendezvousError, or LaunchError, if other hosts cannot reach this one.
        """
        if not self._address_for_others:
            server = reachable_server(self._job.encrypt, lambda: self._open(network_address()))
            self._workers.append(server)
            self._address_for_others = addresses_for_others(server.address)
        return self._address_for_others

    def send(self, worker: int, message: Message) -> None:
        """Sends a message to a worker; nothing happens if it is not connected."""
        packed = pack(message)
        for server in self._workers:
            server.send_message(worker, packed)

    def is_connected(self, worker: int) -> bool:
        """Returns whether a worker is connected: its kernel has not ended its connection."""
        return any(server.is_connected(worker) for server in self._workers)

    def open(self, order: Open) -> None:
        """Opens the rendezvous of a generation, and tells its members. Raises RendezvousError."""
        self.close_generation()
        slots = order.slots
        members = ",".join(f"{worker}@{slot}" for worker, slot in zip(order.members, slots, strict=True))
        digest = hashlib.sha256(f"{order.generation}:{members}".encode()).hexdigest()[:32]
        name, server = f"{self._job.id}.{order.generation}.{digest}", None
        if len(order.members) > 1:
            server = self._generation = self._open_generation(name, slots)
        for worker, slot, place in zip(order.members, slots, order.places, strict=True):
            address = "" if server is None else server.address
            if not is_own_host(slot.host):
                address = addresses_for_others(address)
            elapsed = 0 if order.first_news is None else round((time.monotonic() - order.first_news) * 1e6)
            self.send(worker, replace(place, job=name, address=address, elapsed=elapsed))

    def close_generation(self) -> None:
        """Closes the rendezvous of the last generation, if it is open."""
        if self._generation is not None:
            self._generation.close()
            self._generation = None

    def servers(self) -> list[RendezvousServer]:
        """Returns what has to be polled."""
        return [*self._workers, *([self._generation] if self._generation is not None else [])]

    def serve(self) -> None:
        """Serves the connections, and delivers the messages."""
        for server in self.servers():
            server.poll()
        self.deliver()

    def deliver(self) -> None:
        """Delivers the messages that have come, in their order.

        A message may close a connection, open another, or start a worker, which calls `answer`: so none is
        delivered while a server polls.
        """
        while self._messages:
            worker, frame = self._messages.popleft()
            with contextlib.suppress(RendezvousError):  # no worker of this version has sent it
                self._on_message(worker, unpack(frame))

    def answer(self, seconds: float = _ANSWER_SECONDS, ended: Collection[int] = ()) -> None:
        """Serves the connections, and keeps the messages for `deliver`: the caller carries out orders.

        Returns once nothing is left to read, or nothing of the workers that have ended, and at the latest
        after so many seconds.
        """
        until = time.monotonic() + seconds
        servers, events = self.servers(), select.poll()  # descriptors may be higher than select() takes
        for server in servers:
            events.register(server, select.POLLIN)
        while events.poll(0) and time.monotonic() < until:
            for server in servers:
                server.poll()
            if ended and not any(map(self.is_connected, ended)):
                return

    @property
    def due(self) -> float | None:
        """Returns when to call `serve`, whatever happens (time.monotonic())."""
        if self._messages:
            return time.monotonic()
        times = [due for server in self.servers() if (due := server.time_to_next_deadline()) is not None]
        return time.monotonic() + min(times) if times else None

    def close(self) -> None:
        self.close_generation()
        while self._workers:
            self._workers.pop().close()

    def _open(self, address: str) -> RendezvousServer:
        """Opens a rendezvous with workers."""
        job, note = self._job_of_workers, self._note

        def receive(worker: int, frame: Frame) -> None:
            self._messages.append((worker, frame))

        return RendezvousServer(address, job, _START_SECONDS, note, self._interfaces, receive, self._on_call)

    def _open_generation(self, name: str, slots: Sequence[Slot]) -> RendezvousServer:
        addresses = self._unix_addresses(name)
        if any(not is_own_host(slot.host) for slot in slots):
            addresses += f",{network_address()}"
        job = replace(self._job, id=name, size=len(slots))
        return RendezvousServer(addresses, job, _START_SECONDS, self._note, self._interfaces)

    def _unix_addresses(self, job: str) -> str:
        """Returns a Unix socket's address in the job's folder, and an abstract address as a fallback."""
        name = f"sirtaki-{hashlib.sha256(job.encode()).hexdigest()[:24]}"
        return unix_addresses(name, self._folder)

    def _note(self, event: RankEvent) -> None:
        self.has_initialised |= event.kind == "initialised"
        if event.kind == "thread_failed":
            self.failed_threads.setdefault(f"rank {event.rank}", first_line(event.text))
        if event.kind == "refused":
            self._on_refusal(event.text)
