"""One side of a handshake on a blocking socket, for tests that act as a peer."""

from __future__ import annotations

import socket

from sirtaki.bindings.bootstrap.connection.handshake import handshake_steps
from sirtaki.bindings.bootstrap.connection.wire import receive_exactly, send_all
from sirtaki.bindings.bootstrap.job import HandshakeError, Identity, Job, LinkKind, Role


def run_handshake(
    connection: socket.socket, job: Job, mine: Identity, kind: LinkKind, role: Role, deadline: float
) -> Identity:
    """Runs the handshake on a connected socket and returns the peer's identity.

    Reads no byte beyond the handshake. Raises HandshakeError, or RendezvousTimeout when the deadline passes
    (time.monotonic()).
    """
    steps = handshake_steps(job, mine, kind, role)
    try:
        outgoing, wanted = next(steps)
        while True:
            send_all(connection, outgoing, deadline)
            outgoing, wanted = steps.send(receive_exactly(connection, wanted, deadline))
    except StopIteration as finished:
        peer: Identity = finished.value
        return peer
    except EOFError:
        raise HandshakeError("the other side closed the connection") from None
