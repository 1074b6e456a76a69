"""A collector's connection to the server of the rendezvous, which another one continues when it breaks."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections import Counter
from collections.abc import Iterator

from sirtaki.runner.rendezvous import messages
from sirtaki.runner.rendezvous.job import COLLECTOR_RANK, Identity, Job
from sirtaki.runner.rendezvous.messages import Route
from sirtaki.runner.rendezvous.rendezvous_client import RendezvousClient
from sirtaki.runner.rendezvous.resumable import ResumableFrames
from sirtaki.runner.rendezvous.send_queue import SendQueue
from sirtaki.runner.rendezvous.wire import pack_frame, take_frame

# Seconds after which the kernel ends the connection if what was sent is not acknowledged: by default it tries
# for a quarter of an hour.
LOST_SECONDS = 20
_READ_BYTES = 64 * 1024
_COLLECTOR = Identity(COLLECTOR_RANK)


class ServerLink:
    """The connection to the server at `address`, which does not block once it is made.

    `welcome` is the message for ranks that join. Raises as `RendezvousClient.connect`.
    """

    def __init__(self, address: str, job: Job, seconds: float) -> None:
        self._address = address
        self._job = job
        self._token = os.urandom(messages.TOKEN_BYTES)
        self._frames = ResumableFrames()
        self.unconfirmed = Counter[int]()  # bytes of frames that the server has not confirmed, by their owner
        request = messages.pack_collector_join(job.size, self._token)
        client = RendezvousClient.connect(address, job, _COLLECTOR, seconds, request)
        self.welcome = messages.pack_welcome(client.session, Route(job.encrypt, client.own_addresses()))
        self._use(client)

    def resume(self, seconds: float) -> None:
        """Connects again, and sends what the server has not received. Raises as the constructor."""
        request = messages.pack_resumption(self._token, self._frames.received)
        client, answer = RendezvousClient.resume(self._address, self._job, _COLLECTOR, seconds, request)
        try:
            self._confirm(messages.unpack_count(answer))
        except BaseException:
            client.close()
            raise
        self._use(client)
        for part in self._frames.unconfirmed():
            self._outgoing += part

    def _use(self, client: RendezvousClient) -> None:
        client.keep_alive(LOST_SECONDS)
        self.connection = client.connection
        self.connection.settimeout(0)
        self._incoming = bytearray()
        self._outgoing = SendQueue()

    @property
    def interest(self) -> int:
        """Returns the events to wait for, as a selector's mask."""
        tls = None if isinstance(self.connection, socket.socket) else self.connection
        is_writing = self._outgoing or (tls is not None and tls.wants_write)
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if is_writing else 0)

    def fileno(self) -> int:
        return self.connection.fileno()

    def receive(self) -> bool:
        """Reads what has arrived; returns False at the end of the stream. Raises OSError if it breaks."""
        with contextlib.suppress(BlockingIOError):
            while data := self.connection.recv(_READ_BYTES):
                self._incoming += data
            return False
        return True

    def messages(self) -> Iterator[bytes]:
        """Yields the messages for the collector that have arrived, also those that confirm others. Raises
        RendezvousError.
        """
        limit = messages.delivered_limit(self._job.size)
        while (message := take_frame(self._incoming, limit)) is not None:
            if message[:1] == messages.CONFIRM:
                self._confirm(messages.unpack_count(message[1:]))
            elif message != messages.GOODBYE:
                self._outgoing += self._frames.note_received(len(message))
            yield message

    def _confirm(self, count: int) -> None:
        for owner, size in self._frames.confirm(count):
            self.unconfirmed[owner] -= size
            if not self.unconfirmed[owner]:
                del self.unconfirmed[owner]

    def keep(self, frame: bytes, owner: int) -> None:
        """Notes a frame that is to be sent now, or soon."""
        self._frames.keep(owner, frame)
        self.unconfirmed[owner] += len(frame)

    def send(self, data: bytes) -> None:
        """Queues frames that are kept."""
        self._outgoing += data

    def flush(self) -> None:
        """Sends as much as fits. Raises OSError if the connection is lost."""
        self._outgoing.send(self.connection)

    def close(self) -> None:
        self.connection.close()

    def say_goodbye(self) -> None:
        """Tells the server that this connection ends for good, if there is room for that."""
        self._outgoing += pack_frame(messages.GOODBYE)
        with contextlib.suppress(OSError):
            self.flush()
