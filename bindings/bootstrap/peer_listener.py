"""The listening side of a rank: accepts the connections of peers that authenticate.

Ranks of this host connect over a Unix socket; those of other hosts over TCP, on a port that the operating
system chooses.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from sirtaki.bindings.bootstrap.connection.address import (
    addresses_of,
    chosen_interfaces,
    is_abstract,
    join_address,
    listen_at,
    listen_everywhere,
    require_key,
    unix_address,
    unix_path,
)
from sirtaki.bindings.bootstrap.connection.handshake import (
    HandshakeConnection,
    HandshakeSteps,
    begin_handshake,
    close_selector,
)
from sirtaki.bindings.bootstrap.connection.unauthenticated import (
    TOO_SLOW,
    RejectionLog,
    UnauthenticatedConnections,
    handshake_deadline,
)
from sirtaki.bindings.bootstrap.job import (
    KEY_ADVICE,
    Identity,
    Job,
    LinkKind,
    RendezvousError,
    RendezvousTimeout,
    Role,
    name_ranks,
)
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection

LinkKey = tuple[int, int]  # another rank, and the index of the connection to it


@dataclass(frozen=True)
class Handshakes:
    """The parameters of handshakes with other ranks: the job, this rank, and the deadline (time.monotonic()).

    During the handshakes `rendezvous` reports a rank that has failed, and will therefore never connect.
    """

    job: Job
    mine: Identity
    deadline: float
    rendezvous: RendezvousClient | None = None

    def begin_handshake(self, connection: socket.socket, rank: int, channel: int = 0) -> HandshakeSteps:
        """Runs the handshake with the process that answers. Raises RendezvousError unless it is this rank."""
        require_key(connection, self.job)
        mine = replace(self.mine, channel=channel)
        peer = yield from begin_handshake(connection, self.job, mine, LinkKind.PEERS, Role.CONNECTS)
        if peer.rank != rank:
            raise RendezvousError(f"{peer.name} answers where rank {rank} should be")
        if peer.generation != self.mine.generation:
            raise RendezvousError(
                f"{peer.name} is at its init number {peer.generation}, but {self.mine.name} at number "
                f"{self.mine.generation}: every rank has to call init() as often as the others"
            )
        return peer


class Arrivals(Protocol):
    """Receives the connections that a listener accepts."""

    def wants(self, key: LinkKey) -> bool:
        """Returns whether the connection of this rank and channel is expected, and has not come yet."""

    def take(self, key: LinkKey, connection: Connection) -> None:
        """Takes ownership of a connection that `wants` has accepted."""


@dataclass
class _Expected:
    """The connections that a world needs before it starts."""

    missing: set[LinkKey]
    connections: dict[LinkKey, Connection]

    def wants(self, key: LinkKey) -> bool:
        return key in self.missing

    def take(self, key: LinkKey, connection: Connection) -> None:
        self.missing.discard(key)
        self.connections[key] = connection


class PeerListener:
    """This rank's listening sockets; on TCP only once `listen_to_hosts` has been called."""

    def __init__(self, folder: str = "") -> None:
        """Starts to listen on a Unix socket, in `folder` if the launcher has made a private folder."""
        self._selector = selectors.DefaultSelector()
        self._name = "a rank"
        self._unauthenticated = UnauthenticatedConnections[HandshakeConnection](self._reject)
        self._rejection_log = RejectionLog(_say)
        self.name, local = _listen_locally(folder)
        self._listen(local)

    def listen_to_hosts(self, reachable: list[str], job: Job) -> list[str]:
        """Starts accepting ranks of other hosts; returns this rank's addresses, the known reachable first.

        `reachable` are addresses of this machine that are known to be reachable. Raises RendezvousError
        without a key of the user's or of the launcher's.
        """
        if not job.key or job.through_store:
            raise RendezvousError(f"ranks of several hosts need a common key: {KEY_ADVICE}")
        listening = listen_everywhere()
        self._listen(listening)
        addresses = addresses_of(listening, chosen_interfaces())
        preferred = [join_address(address, listening.getsockname()[1]) for address in reachable]
        return sorted(addresses, key=lambda address: address not in preferred)

    def accept(
        self, handshakes: Handshakes, expected: set[LinkKey], connections: dict[LinkKey, Connection]
    ) -> Accepting:
        """Starts accepting each of the `expected` connections, and adds it to `connections`.

        The caller closes all, even after an error.

        Unauthenticated connections are rejected, and never block the others.
        """
        return Accepting(self, handshakes, _Expected(expected - connections.keys(), connections))

    def poll(self, handshakes: Handshakes, arrivals: Arrivals, seconds: float) -> None:
        """Serves what has arrived, after waiting for at most `seconds` for something to arrive."""
        self._name = handshakes.mine.name
        for key, _ in self._selector.select(min(seconds, self._time_to_next_deadline())):
            if isinstance(key.data, HandshakeConnection):
                self._serve(key.data, handshakes, arrivals)
            else:
                key.data(handshakes)
        self._unauthenticated.expire(time.monotonic(), TOO_SLOW)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` has something to serve."""
        return self._selector.fileno()

    def listen_for_wake(self, bell: socket.socket) -> None:
        """Ends the wait of `poll` when the other end of `bell`, which this listener then owns, closes."""
        self._selector.register(bell, selectors.EVENT_READ, lambda _: None)

    def close_in_child(self) -> None:
        """Closes a forked child's duplicates: the parent's listener goes on."""
        close_selector(self._selector)

    @contextlib.contextmanager
    def polling_rendezvous(self, handshakes: Handshakes) -> Iterator[None]:
        """Polls the rendezvous within the `with` block: it reports when a rank has failed."""
        rendezvous = handshakes.rendezvous
        if rendezvous is not None:
            raise_failure = rendezvous.raise_failure
            if rendezvous.has_unread:
                raise_failure(handshakes.deadline)
            self._selector.register(
                rendezvous, selectors.EVENT_READ, lambda _: raise_failure(handshakes.deadline)
            )
        try:
            yield
        finally:
            if rendezvous is not None:
                self._selector.unregister(rendezvous)

    def __enter__(self) -> PeerListener:
        return self

    def __exit__(self, *exception: object) -> None:
        close_selector(self._selector)
        if not is_abstract(self.name):
            with contextlib.suppress(OSError):
                os.unlink(unix_path(self.name))

    def _listen(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ, partial(self._accept_pending, listening))

    def _accept_pending(self, listening: socket.socket, handshakes: Handshakes) -> None:
        connection = self._unauthenticated.accept(listening)
        if connection is None:
            return
        steps = begin_handshake(connection, handshakes.job, handshakes.mine, LinkKind.PEERS, Role.ACCEPTS)
        pending = HandshakeConnection(connection, steps, handshake_deadline(connection))
        self._unauthenticated.add(pending)
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, pending)

    def _serve(self, pending: HandshakeConnection, handshakes: Handshakes, arrivals: Arrivals) -> None:
        if pending not in self._unauthenticated:  # displaced by a newer connection
            return
        try:
            is_open = pending.is_complete or pending.advance()
        except RendezvousError as error:
            pending.flush_hello()
            self._reject(pending, str(error))
            return
        is_chosen = pending.read_choice() if pending.is_complete else None
        peer = pending.peer
        if peer is not None and is_chosen:
            key = (peer.rank, peer.channel)
            if peer.generation == handshakes.mine.generation and arrivals.wants(key):
                self._remove(pending)
                arrivals.take(key, pending.hand_over())
            else:
                self._close(pending)
        elif is_chosen is False or not is_open:  # it had several addresses, and another connection was faster
            self._close(pending)
        else:
            self._selector.modify(pending.socket, pending.interest, pending)

    def _time_to_next_deadline(self) -> float:
        """Returns the seconds until the next connection times out."""
        ends = self._unauthenticated.next_deadline
        return math.inf if ends is None else max(ends - time.monotonic(), 0)

    def _reject(self, pending: HandshakeConnection, reason: str) -> None:
        self._rejection_log.add(f"{self._name} refused a connection from {pending.origin}: {reason}")
        self._close(pending)

    def _close(self, pending: HandshakeConnection) -> None:
        self._remove(pending)
        pending.socket.close()

    def _remove(self, pending: HandshakeConnection) -> None:
        self._unauthenticated.discard(pending)
        self._selector.unregister(pending.socket)


class Accepting:
    """The connections that a listener accepts for a world before it starts."""

    def __init__(self, listener: PeerListener, handshakes: Handshakes, expected: _Expected) -> None:
        self._listener, self._handshakes, self._expected = listener, handshakes, expected

    def fileno(self) -> int:
        return self._listener.fileno()

    def serve(self) -> None:
        """Serves what has arrived, without waiting."""
        self._listener.poll(self._handshakes, self._expected, 0)

    def finish(self) -> None:
        """Returns when all connections are there.

        Raises RendezvousTimeout at the deadline of the handshakes, and RendezvousError as soon as a rank has
        failed.
        """
        missing, deadline = self._expected.missing, self._handshakes.deadline
        with self._listener.polling_rendezvous(self._handshakes):
            while missing:
                left = deadline - time.monotonic()
                if left <= 0:
                    ranks = sorted({rank for rank, _ in missing})
                    raise RendezvousTimeout(f"no connection came from {name_ranks(ranks)} in time", ranks[0])
                self._listener.poll(self._handshakes, self._expected, left)


def has_ended(connection: Connection) -> bool:
    """Returns whether the peer has closed a connection and left no unread data: it may connect again."""
    plain = connection if isinstance(connection, socket.socket) else connection.socket
    try:
        return not plain.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _say(text: str) -> None:
    """Writes a line to standard error, which a running program may have closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"sirtaki: {text}", file=sys.stderr)


def _listen_locally(folder: str) -> tuple[str, socket.socket]:
    """Returns the address of a new listening Unix socket, and the socket; abstract if the folder is gone."""
    name = f"sirtaki-{os.getpid()}-{secrets.token_hex(8)}"
    with contextlib.suppress(RendezvousError):
        address = unix_address(name, folder)
        return address, listen_at(address, b"")
    address = unix_address(name)
    return address, listen_at(address, b"")
