"""The links that a rank makes while it runs: with whom an operation needs one, when it first does.

A rank starts with few links (`first_links` of the core). Both ranks of a further link ask for it when the
same operation needs it. As at the start, the higher rank connects, and the lower one accepts.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.bindings.link_requests import LinkRequests
from sirtaki.runner.rendezvous.encryption import Connection
from sirtaki.runner.rendezvous.job import RendezvousError
from sirtaki.runner.rendezvous.links import Connections, PeerEndpoint, close_all, connect_to, link_sockets
from sirtaki.runner.rendezvous.peer_listener import Handshakes, LinkKey, PeerListener, has_ended

_ATTEMPT_SECONDS = 15.0  # between checks whether the link is still needed
_PAUSE_SECONDS = 0.2  # between attempts
_JOIN_SECONDS = 1.0
_LONGEST_WAIT = 3600.0  # of the listener, which is woken when it has to end


@dataclass(frozen=True)
class Neighbourhood:
    """The other ranks, as a running rank sees them.

    Attributes:
        endpoints: how each of them is reached.
        linked: those with which the rank starts.
        seconds: that a rank may take to answer, before it counts as lost.
    """

    endpoints: Mapping[int, PeerEndpoint]
    linked: frozenset[int]
    seconds: float


@dataclass(eq=False)
class LateLinks:
    """Makes the further links of a context, on two threads: one accepts, the other connects.

    Created before the context starts; `start` takes over the listener afterwards.
    """

    context: Context
    neighbourhood: Neighbourhood
    handshakes: Handshakes
    _arrived: dict[int, Connections] = field(default_factory=dict)  # links of which connections are missing
    _accepted: set[int] = field(default_factory=set)  # ranks that have connected since the start

    def __post_init__(self) -> None:
        self._requests = LinkRequests(self.context)
        self._bell: socket.socket | None = None  # its end is that of the accepting thread
        self._listener: PeerListener | None = None
        self._threads = [
            threading.Thread(target=run, name="sirtaki links", daemon=True)
            for run in (self._accept, self._connect)
        ]
        _live.add(self)

    def start(self, listener: PeerListener) -> None:
        """Takes over the listener, and begins to serve the context, which has started."""
        self._bell, other_end = socket.socketpair()
        listener.listen_for_wake(other_end)
        self._listener = listener
        self.context.end_callbacks.append(self.close)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads, once the context has ended; one that is connecting ends by itself."""
        self._end_accepting()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def close_in_child(self) -> None:
        """Closes a forked child's duplicates, so that the end of the parent shows to the other ranks."""
        self._end_accepting()
        if self._listener is not None:
            self._listener.close_in_child()
        for connections in self._arrived.values():
            close_all(connections)

    def _end_accepting(self) -> None:
        if self._bell is not None:
            self._bell.close()

    # ---- Accepting: an `Arrivals` for the listener -------------------------------------------------------

    def wants(self, key: LinkKey) -> bool:
        rank, channel = key
        is_known = rank in self.neighbourhood.linked or rank in self._accepted
        endpoint = self.neighbourhood.endpoints.get(rank)
        if endpoint is None or is_known or rank < self.handshakes.mine.rank or channel >= endpoint.channels:
            return False
        earlier = self._arrived.get(rank, {}).get(key)
        return earlier is None or has_ended(earlier)

    def take(self, key: LinkKey, connection: Connection) -> None:
        rank, _ = key
        arrived = self._arrived.setdefault(rank, {})
        if key in arrived:  # and has ended
            arrived[key].close()
        arrived[key] = connection
        if len(arrived) == self.neighbourhood.endpoints[rank].channels:
            self._accepted.add(rank)
            self._hand_over(self._arrived.pop(rank))

    def _accept(self) -> None:
        assert self._listener is not None
        assert self._bell is not None
        try:
            with self._listener as listener:
                while self._bell.fileno() >= 0:
                    listener.poll(self.handshakes, self, _LONGEST_WAIT)
        except Exception as error:
            self.context.abort(f"it cannot accept links to other ranks any more: {error}")
            raise
        finally:
            for connections in self._arrived.values():
                close_all(connections)

    # ---- Connecting --------------------------------------------------------------------------------------

    def _connect(self) -> None:
        while (ranks := self._requests.collect()) is not None:
            for rank in sorted(ranks):
                if rank < self.handshakes.mine.rank:
                    self._link_to(rank)
        self._end_accepting()

    def _link_to(self, rank: int) -> None:
        endpoint = self.neighbourhood.endpoints[rank]
        connections: Connections = {}
        try:
            for channel in range(endpoint.channels):
                connections[rank, channel] = self._reach(endpoint, rank, channel)
            self._hand_over(connections)
        except Exception as error:  # without a thread that links, operations would wait in vain
            close_all(connections)
            self._requests.fail(rank, f"an operation needs a link to it, and there can be none: {error}")

    def _reach(self, endpoint: PeerEndpoint, rank: int, channel: int) -> Connection:
        """Connects to a rank. It may be busy, or have failed, of which this rank will hear: all attempts that
        fail are repeated.
        """
        deadline = time.monotonic() + self.neighbourhood.seconds
        while True:
            attempt = min(deadline, time.monotonic() + _ATTEMPT_SECONDS)
            try:
                return connect_to(endpoint, rank, channel, replace(self.handshakes, deadline=attempt))
            except RendezvousError:
                if self.context.failure is not None or time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _hand_over(self, connections: Connections) -> None:
        try:
            link_sockets(self.context, connections)
        except HorovodInternalError:
            close_all(connections)
            if self.context.failure is None and not self.context.is_shut_down:
                raise


_live: weakref.WeakSet[LateLinks] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_live):
        one.close_in_child()


os.register_at_fork(after_in_child=_after_fork)
