"""The rendezvous of a job: an all-gather of small byte strings among its ranks, and reports of how each rank
ended.

hvdrun runs the `RendezvousServer` for the ranks that it starts; without a launcher rank 0 runs it. Each rank
has a `RendezvousClient`, connected in `init()` and kept until shutdown. Addresses are "unix:@name" (an
abstract Unix socket) or "host:port".
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Set
from typing import TYPE_CHECKING

from sirtaki.bindings.bootstrap import messages
from sirtaki.bindings.bootstrap.connection.address import (
    is_unix,
    require_key,
    source_towards,
    split_addresses,
)
from sirtaki.bindings.bootstrap.connection.connect import connect
from sirtaki.bindings.bootstrap.connection.handshake import (
    HandshakeSteps,
    begin_handshake,
    check_encryption,
    is_trusted_user,
)
from sirtaki.bindings.bootstrap.connection.wire import (
    FROM,
    Frame,
    MessageKind,
    Sender,
    printable,
    receive_frame,
    send_frame,
)
from sirtaki.bindings.bootstrap.job import Identity, Job, LinkKind, RendezvousError, RendezvousTimeout, Role
from sirtaki.bindings.bootstrap.messages import Route

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection

_REPORT_SECONDS = 2.0  # a report must never delay a process that is ending
_PROBE_SECONDS = 60
_ENDS = {MessageKind.FAILED, MessageKind.REJECTED, MessageKind.TIMED_OUT}  # in place of any answer
_SLACK_SECONDS = 10.0  # the server answers at its deadline; a client without an answer then gives up


class RendezvousGoneError(RendezvousError):
    """The connection to the rendezvous has ended, without a reason."""

    def __init__(self) -> None:
        super().__init__("the rendezvous of this job is gone: its launcher (hvdrun), or rank 0, has ended")


class RendezvousClient:
    """A rank's connection to the rendezvous. Not thread-safe, except for `report`."""

    def __init__(self, connection: Connection, job: Job, rank: int, start_timeout: float) -> None:
        self._connection = connection
        self._job = job
        self._rank = rank
        self._start_timeout = start_timeout
        self._round = 0
        self._sending = threading.Lock()  # a thread that fails reports it whenever that happens
        self.failure_reported = False  # whether the rendezvous has reported that this init() failed
        self.session = b""  # random, chosen by the rendezvous: separates jobs that share a key and an id
        self._route: Route | None = None  # the collector's, if this is connected to one

    @classmethod
    def connect(
        cls, address: str, job: Job, mine: Identity, start_timeout: float = 120.0, token: bytes = b""
    ) -> RendezvousClient:
        """Connects to any of the addresses, proves that this is rank `mine.rank` of `job`, and joins.

        `start_timeout` is in seconds; a collector passes its `token`.

        Raises RendezvousError with the server's reason if it rejects this rank, RendezvousTimeout if no
        server answers in time. Behind a collector, the first all-gather raises the server's reason.
        """
        kind = MessageKind.JOIN_HOST if token else MessageKind.JOIN
        request = Frame(kind, payload=token, number=job.size)
        client, answer = cls._open(address, job, mine, start_timeout, request, MessageKind.WELCOME)
        try:
            client._take_welcome(answer)
        except BaseException:
            client.close()
            raise
        return client

    @classmethod
    def resume(
        cls, address: str, job: Job, mine: Identity, seconds: float, request: Frame
    ) -> tuple[RendezvousClient, Frame]:
        """Connects to continue an interrupted connection; returns the server's answer, too. Raises as
        `connect`.
        """
        return cls._open(address, job, mine, seconds, request, MessageKind.RESUMED)

    @classmethod
    def _open(
        cls, address: str, job: Job, mine: Identity, seconds: float, request: Frame, wanted: MessageKind
    ) -> tuple[RendezvousClient, Frame]:
        deadline = time.monotonic() + seconds
        client = cls(_connect(split_addresses(address), job, mine, deadline), job, mine.rank, seconds)
        try:
            client._request(request, deadline)
            return client, client._receive({wanted}, deadline)
        except BaseException:
            client.close()
            raise

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Contributes `payload` (at most 64 KiB) and returns the payloads of all ranks, by rank. Every rank
        must call it.

        Raises RendezvousTimeout, naming the ranks that are missing, `start_timeout` seconds after the first
        arrived; RendezvousError at once if a rank is gone and so will never arrive.
        """
        if len(payload) > messages.PAYLOAD_LIMIT:
            raise ValueError(f"a payload has at most {messages.PAYLOAD_LIMIT} bytes, not {len(payload)}")
        deadline = time.monotonic() + self._start_timeout + _SLACK_SECONDS
        self._request(Frame(MessageKind.GATHER, payload=payload, number=self._round), deadline)
        self._round += 1
        gathered = self._receive({MessageKind.GATHERED}, deadline)
        return messages.unpack_payloads(gathered, self._job.size)

    def report_failure(self, text: str, culprit: int) -> RendezvousError | None:
        """Reports that this rank cannot join, because of `culprit`: all ranks fail at once.

        Returns the first failure in this init(), unless that is this rank's own.
        """
        if self.failure_reported:
            return None
        deadline = time.monotonic() + _REPORT_SECONDS
        try:
            self._request(Frame.of(MessageKind.FAILED, text, culprit), deadline)
            self.raise_failure(deadline)
        except RendezvousError as error:
            self.failure_reported = error.culprit not in (None, self._rank)
            return error if self.failure_reported else None
        return None

    def raise_failure(self, deadline: float) -> None:
        """Raises the failure that the rendezvous reports, or an error that the rendezvous is gone."""
        self._receive(set(), deadline)

    def report(self, event: str, text: str = "") -> None:
        """Reports this rank's state to the launcher: an event of `messages.REPORTS`, with the error's text
        for a failure.

        Always returns within seconds, and raises nothing if the launcher is gone.
        """
        if event not in messages.REPORTS:
            raise ValueError(f"there is no event {event!r}: use one of {', '.join(messages.REPORTS)}")
        try:
            frame = Frame.of(MessageKind.EVENT, text, number=messages.REPORTS.index(event))
            self.send_message(frame, time.monotonic() + _REPORT_SECONDS)
        except (OSError, RendezvousError):
            return

    def send_message(self, frame: Frame, deadline: float) -> None:
        """Sends a message to the process that runs the rendezvous."""
        try:
            with self._sending:
                send_frame(self._connection, frame, deadline)
        except EOFError:
            raise RendezvousGoneError from None

    def receive_message(self, deadline: float) -> Frame:
        """Returns the next message of the process that runs the rendezvous.

        One thread may receive messages while another sends, if nothing else uses this client.
        """
        return self._receive(FROM[Sender.LAUNCHER], deadline)

    def call(self, request: Frame, deadline: float) -> Frame:
        """Sends a request to the launcher's service, and returns the answer.

        This client has connected on the channel CALLS.
        """
        self._request(request, deadline)
        return self._receive({MessageKind.REPLY}, deadline)

    def keep_alive(self, lost_seconds: int = 0) -> None:
        """Has the kernel probe the idle connection: networks cut connections that look unused.

        The kernel ends the connection if the peer has not acknowledged data or a probe for `lost_seconds`, if
        that is not 0.
        """
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * lost_seconds)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, lost_seconds or _PROBE_SECONDS)

    def close(self) -> None:
        """Closes this process's end; in a forked child the parent's connection stays open."""
        with contextlib.suppress(OSError):  # the program may have closed the descriptor
            self._connection.close()

    @property
    def has_unread(self) -> bool:
        """Returns whether data has arrived that waiting for `fileno()` would not report."""
        return not isinstance(self._connection, socket.socket) and self._connection.unread > 0

    def fileno(self) -> int:
        return self._connection.fileno()

    def own_addresses(self) -> list[str]:
        """Returns this machine's address on the route to the rendezvous; [] if that is on this machine."""
        return source_towards(self._socket) if self._route is None else list(self._route.addresses)

    @property
    def connection(self) -> Connection:
        """Returns the connection, for an owner that exchanges its messages without this object."""
        return self._connection

    @property
    def _socket(self) -> socket.socket:
        return self._connection if isinstance(self._connection, socket.socket) else self._connection.socket

    def _take_welcome(self, welcome: Frame) -> None:
        """Raises HandshakeError if a collector does not encrypt what this rank wants to be encrypted."""
        self.session, self._route = messages.unpack_welcome(welcome)
        if self._route is not None:
            mine = Identity(self._rank)
            check_encryption(self._route.encrypt, "the rendezvous", self._job.encrypt, mine.name)

    def _request(self, frame: Frame, deadline: float) -> None:
        """Sends a message that has an answer, which this thread receives.

        A rank behind a collector may be refused after its welcome: if the connection has ended, raises the
        reason that was received before.
        """
        try:
            self.send_message(frame, deadline)
        except RendezvousGoneError:
            self.raise_failure(time.monotonic() + _REPORT_SECONDS)

    def _receive(self, wanted: Set[MessageKind], deadline: float) -> Frame:
        try:
            answer = receive_frame(self._connection, deadline, wanted | _ENDS, self._job.size)
        except EOFError:
            raise RendezvousGoneError from None
        if answer.kind in wanted:
            return answer
        self.failure_reported = True
        if answer.kind == MessageKind.FAILED:
            raise RendezvousError(printable(answer.text), answer.rank)
        text = printable(answer.text)
        raise RendezvousTimeout(text) if answer.kind == MessageKind.TIMED_OUT else RendezvousError(text)


def _connect(addresses: list[str], job: Job, mine: Identity, deadline: float) -> Connection:
    def begin(connection: socket.socket) -> HandshakeSteps:
        require_key(connection, job)
        if connection.family == socket.AF_UNIX and not is_trusted_user(connection):
            raise RendezvousError("another user's process answers where the rendezvous of this job should be")
        return begin_handshake(connection, job, mine, LinkKind.RENDEZVOUS, Role.CONNECTS)

    try:
        return connect(addresses, begin, deadline)[0]
    except RendezvousTimeout as error:
        if all(map(is_unix, addresses)):
            raise RendezvousError(f"the launcher (hvdrun) of this job is gone: {error}") from None
        raise
