"""Calls of ranks to their launcher, on connections of their own beside those of the worlds."""

from __future__ import annotations

import os
import selectors
import socket

import pytest
from collected_hosts import JOB, CollectedHosts, Start
from handshakes import run_handshake
from launching import deadline, wait_until

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, receive_frame, send_frame
from sirtaki.bindings.bootstrap.job import CALLS, Identity, LinkKind, RendezvousError, Role
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server import connection_server
from sirtaki.bindings.bootstrap.server.connection_server import ConnectionServer, ServedConnection

MEBIBYTE = 1 << 20


def answer(rank: int, request: Frame) -> bytes:
    if request.payload == b"refuse":
        raise RendezvousError(f"rank {rank} asks too much")
    return b"%d:" % rank + request.payload[::-1]


def call(client: RendezvousClient, payload: bytes) -> bytes:
    return client.call(Frame(MessageKind.PIECE, payload=payload), deadline()).payload


@pytest.fixture
def hosts(start: Start) -> CollectedHosts:
    return start(on_call=answer)


def connect(hosts: CollectedHosts, rank: int, channel: int = CALLS) -> RendezvousClient:
    return hosts.connect(rank, generation=0, channel=channel)


def test_each_request_has_its_answer_while_ranks_take_part_in_a_world(hosts: CollectedHosts) -> None:
    callers = {rank: connect(hosts, rank) for rank in (0, 1, 2, 3, 4)}
    for rank in (0, 4):
        callers[rank].close()  # that is no departure from a world
    assert hosts.works()
    for request in (b"", b"abc", b"x" * (MEBIBYTE - 2)):
        for rank in (1, 2, 3):
            assert call(callers[rank], request) == b"%d:" % rank + request[::-1]
    assert {event.kind for event in hosts.events} == {"arrived"}


def test_a_silent_connection_is_probed(hosts: CollectedHosts) -> None:
    client = connect(hosts, 0)
    client.keep_alive()
    with socket.socket(fileno=os.dup(client.fileno())) as same:
        assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
    assert call(client, b"abc") == b"0:cba"


def test_two_callers_with_one_number(hosts: CollectedHosts) -> None:
    first = connect(hosts, 1)
    with pytest.raises(RendezvousError, match="two processes claim to be rank 1"):
        connect(hosts, 1)
    assert call(first, b"abc") == b"1:cba"


def test_a_refusal_ends_the_connection(hosts: CollectedHosts) -> None:
    client = connect(hosts, 1)
    with pytest.raises(RendezvousError, match=r"^rank 1 asks too much$"):
        call(client, b"refuse")
    with pytest.raises(RendezvousError, match="is gone"):
        call(client, b"abc")


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        (0, Frame(MessageKind.PIECE, payload=b"abc")),  # on a connection for worlds
        (CALLS, Frame(MessageKind.EVENT)),  # on one for calls
        (CALLS, Frame(MessageKind.GATHER)),
        (CALLS, Frame(MessageKind.JOIN, number=JOB.size)),  # for a second time
    ],
)
def test_messages_on_the_wrong_connection(hosts: CollectedHosts, channel: int, message: Frame) -> None:
    client = connect(hosts, 0, channel)
    client.send_message(message, deadline())
    with pytest.raises(RendezvousError, match=f"^{message.kind.name} is not expected now$"):
        client._receive({MessageKind.REPLY}, deadline())


def test_a_call_of_one_that_has_not_joined(hosts: CollectedHosts) -> None:
    with hosts.visit() as client:
        mine = Identity(0, channel=CALLS)
        run_handshake(client, JOB, mine, LinkKind.RENDEZVOUS, Role.CONNECTS, deadline())
        send_frame(client, Frame(MessageKind.PIECE, payload=b"abc"), deadline())
        assert receive_frame(client, deadline(), MessageKind).kind == MessageKind.REJECTED


def test_a_request_that_is_too_long(hosts: CollectedHosts) -> None:
    client = connect(hosts, 0)
    header = Frame(MessageKind.PIECE).pack()[:-4] + (MEBIBYTE + 1).to_bytes(4, "big")
    client.connection.sendall(header)
    with pytest.raises(RendezvousError, match="PIECE has 1048577 bytes where 1048576 are allowed"):
        client._receive({MessageKind.REPLY}, deadline())


def test_a_refused_client_that_does_not_read_loses_its_connection(
    hosts: CollectedHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_server, "CLOSING_SECONDS", 0.1)
    dropped: list[tuple[int, bool]] = []  # the events that the server waited for, and whether it had more

    def drop(connection: ServedConnection) -> None:
        dropped.append((connection.interest, bool(connection.outgoing)))
        ConnectionServer._drop(hosts.server, connection)

    monkeypatch.setattr(hosts.server, "_drop", drop)
    client = connect(hosts, 0)
    with socket.socket(fileno=os.dup(client.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(12):
            send_frame(same, Frame(MessageKind.PIECE, payload=b"x" * (MEBIBYTE - 2)), deadline())
        for payload in (b"refuse", b"not read"):
            send_frame(same, Frame(MessageKind.PIECE, payload=payload), deadline())
        wait_until(lambda: bool(dropped), "the server closes the connection")
    assert dropped == [(selectors.EVENT_WRITE, True)]
    assert call(connect(hosts, 0), b"abc") == b"0:cba"


def test_a_server_without_a_service(start: Start) -> None:
    client = connect(start(), 0)
    with pytest.raises(RendezvousError, match="PIECE is not expected now"):
        call(client, b"abc")
