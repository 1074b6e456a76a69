"""Connects to each other rank: over a Unix socket on this host, over TCP to other hosts.

Each rank listens (`reception`); it connects to the lower ranks and accepts the higher ones, so there is no
circular wait.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..context import Context
from .address import is_unix
from .arrival import is_ours
from .dial import dial
from .encryption import Connection
from .handshake import BootstrapError, BootstrapTimeout, Conversation
from .reception import Meeting, Place, Reception

_DIAL_SECONDS = 30.0  # all ranks listen before any connects: a rank that does not answer never will

Connections = dict[Place, Connection]


@dataclass(frozen=True)
class Whereabouts:
    """A rank's endpoint: its name in messages, the addresses to try, and the number of connections."""

    name: str
    addresses: list[str]
    channels: int = 1


def connect_all(
    reception: Reception, ranks: Mapping[int, Whereabouts], meeting: Meeting, connections: Connections
) -> None:
    """Connects to every other rank; puts the sockets into `connections`, by rank and channel.

    The caller closes them, including those made before an error.

    Raises:
        BootstrapError: a rank is gone, is unreachable, or is not the expected one.
        BootstrapTimeout: a rank did not arrive in time.
    """
    places = [
        (rank, channel) for rank, whereabouts in ranks.items() for channel in range(whereabouts.channels)
    ]
    for rank, channel in sorted(places):
        if rank < meeting.mine.rank:
            connections[rank, channel] = _connect(ranks[rank], rank, channel, meeting)
    reception.accept(meeting, {place for place in places if place[0] > meeting.mine.rank}, connections)


def _connect(whereabouts: Whereabouts, rank: int, channel: int, meeting: Meeting) -> Connection:
    def greet(connection: socket.socket) -> Conversation:
        if connection.family == socket.AF_UNIX and not is_ours(connection):
            raise BootstrapError(f"another user's process answers where rank {rank} should be")
        return meeting.greet(connection, rank, channel)

    deadline = min(meeting.deadline, time.monotonic() + _DIAL_SECONDS)
    try:
        return dial(whereabouts.addresses, greet, deadline)[0]
    except BootstrapTimeout as error:
        if all(map(is_unix, whereabouts.addresses)):
            raise BootstrapError(f"{whereabouts.name} is gone: {error}", rank) from None
        raise BootstrapTimeout(
            f"{whereabouts.name} cannot be reached: {error}. Is there a network between the hosts on which "
            "any port may be used, or a firewall? SIRTAKI_NETWORK_INTERFACES=eth0, for example, says which "
            "network to use"
        ) from None
    except OSError as error:
        raise BootstrapError(f"{whereabouts.name} is gone: {error.strerror or error}", rank) from None


def close_all(connections: Connections) -> None:
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
