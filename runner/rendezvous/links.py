"""Connects to other ranks: over a Unix socket on this host, over TCP to other hosts.

Each rank listens (`peer_listener`); it connects to the lower ranks, and accepts the higher ones meanwhile, so
none waits for another one's turn.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sirtaki.bindings.context import Context
from sirtaki.runner.rendezvous.address import is_unix
from sirtaki.runner.rendezvous.connect import Meanwhile, connect
from sirtaki.runner.rendezvous.encryption import Connection
from sirtaki.runner.rendezvous.handshake import CHOSEN, HandshakeSteps
from sirtaki.runner.rendezvous.handshake_connection import is_trusted_user
from sirtaki.runner.rendezvous.job import RendezvousError, RendezvousTimeout
from sirtaki.runner.rendezvous.peer_listener import Handshakes, LinkKey, PeerListener

_CONNECT_SECONDS = 30.0  # all ranks listen before any connects: a rank that does not answer never will

Connections = dict[LinkKey, Connection]


@dataclass(frozen=True)
class PeerEndpoint:
    """A rank's endpoint: its name in messages, the addresses to try, and the number of connections."""

    name: str
    addresses: list[str]
    channels: int = 1


def connect_all(
    listener: PeerListener,
    ranks: Mapping[int, PeerEndpoint],
    handshakes: Handshakes,
    connections: Connections,
) -> None:
    """Connects to each of these ranks, which do the same; puts the sockets into `connections`, by rank and
    channel.

    The caller closes them, including those made before an error.

    Raises:
        RendezvousError: a rank is gone, is unreachable, or is not the expected one.
        RendezvousTimeout: a rank did not arrive in time.
    """
    keys = [(rank, channel) for rank, endpoint in ranks.items() for channel in range(endpoint.channels)]
    expected = {key for key in keys if key[0] > handshakes.mine.rank}
    accepting = listener.accept(handshakes, expected, connections)
    for rank, channel in sorted(set(keys) - expected):
        connections[rank, channel] = connect_to(ranks[rank], rank, channel, handshakes, accepting)
    accepting.finish()


def connect_to(
    endpoint: PeerEndpoint,
    rank: int,
    channel: int,
    handshakes: Handshakes,
    meanwhile: Meanwhile | None = None,
) -> Connection:
    """Connects to a rank that accepts, and serves `meanwhile` until then. Raises as `connect_all`."""

    def begin_handshake(connection: socket.socket) -> HandshakeSteps:
        if connection.family == socket.AF_UNIX and not is_trusted_user(connection):
            raise RendezvousError(f"another user's process answers where rank {rank} should be")
        return handshakes.begin_handshake(connection, rank, channel)

    deadline = min(handshakes.deadline, time.monotonic() + _CONNECT_SECONDS)
    try:
        connection, _ = connect(endpoint.addresses, begin_handshake, deadline, meanwhile)
        choose(connection)
        return connection
    except RendezvousTimeout as error:
        if all(map(is_unix, endpoint.addresses)):
            raise RendezvousError(f"{endpoint.name} is gone: {error}", rank) from None
        raise RendezvousTimeout(
            f"{endpoint.name} cannot be reached: {error}. The network between the hosts has to allow every "
            "port: is there a firewall? SIRTAKI_NETWORK_INTERFACES=eth0, for example, selects the network to "
            "use"
        ) from None
    except ConnectionError as error:
        raise RendezvousError(f"{endpoint.name} is gone: {error.strerror or error}", rank) from None
    except OSError as error:  # no descriptors, for example: the other rank is not to blame
        raise RendezvousError(f"no connection to {endpoint.name}: {error.strerror or error}") from None


def choose(connection: Connection) -> None:
    """Tells the rank that has accepted a connection to use it; closes the connection if that rank is gone."""
    try:
        connection.send(CHOSEN)
    except OSError:
        connection.close()
        raise


def close_all(connections: Mapping[Any, Connection]) -> None:
    for connection in connections.values():
        connection.close()


def link_sockets(context: Context, sockets: Connections) -> None:
    """Hands the sockets to the core as links, in the order of their channels; the core takes ownership."""
    for (rank, _), connection in sorted(sockets.items()):
        if isinstance(connection, socket.socket):
            context.link_socket(rank, connection.fileno())
            connection.detach()
        else:
            connection.give_to(context, rank)
