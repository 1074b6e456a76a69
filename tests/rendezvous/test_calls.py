"""Calls of ranks to their launcher, on connections of their own beside those of the worlds."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator

import pytest
from handshakes import run_handshake
from launching import FAILSAFE_SECONDS, deadline, wait_until

from sirtaki.bindings.bootstrap.connection.address import split_address
from sirtaki.bindings.bootstrap.connection.wire import pack_frame, receive_frame, send_frame
from sirtaki.bindings.bootstrap.job import CALLS, Identity, Job, LinkKind, RendezvousError, Role
from sirtaki.bindings.bootstrap.messages import (
    CALL,
    CALL_LIMIT,
    GATHERED,
    JOIN,
    NUMBER,
    REFUSED,
    RankEvent,
    pack_report,
)
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server import connection_server
from sirtaki.bindings.bootstrap.server.connection_server import ConnectionServer, ServedConnection
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

JOB = Job("job", 2, b"k" * 32, "1.0")
MEBIBYTE = CALL_LIMIT - 64


def answer(rank: int, request: bytes) -> bytes:
    if request == b"refuse":
        raise RendezvousError(f"rank {rank} asks too much")
    return b"%d:" % rank + request[::-1]


@pytest.fixture
def events() -> list[RankEvent]:
    return []


@pytest.fixture
def server(events: list[RankEvent]) -> Iterator[RendezvousServer]:
    with RendezvousServer("127.0.0.1:0", JOB, FAILSAFE_SECONDS, events.append, on_call=answer) as started:
        yield started


def connect(
    server: RendezvousServer, rank: int, channel: int = CALLS, generation: int = 0
) -> RendezvousClient:
    mine = Identity(rank, generation, channel)
    return RendezvousClient.connect(server.address, JOB, mine, FAILSAFE_SECONDS)


def test_each_request_has_its_answer(server: RendezvousServer) -> None:
    clients = [connect(server, rank) for rank in range(2)]
    for text in (b"", b"abc", b"x" * (MEBIBYTE - 2)):
        for rank, client in enumerate(clients):
            assert client.call(text, deadline()) == b"%d:" % rank + text[::-1]


def test_a_rank_calls_while_it_takes_part_in_a_world(
    server: RendezvousServer, events: list[RankEvent]
) -> None:
    callers = [connect(server, rank) for rank in range(2)]
    members = [connect(server, rank, channel=0) for rank in range(2)]
    callers[0].close()  # that is no departure from a world
    for rank, member in enumerate(members):
        member._send(b"G" + NUMBER.pack(0) + b"%d" % rank, deadline())
    for member in members:
        assert b"0" in member._receive(GATHERED, deadline(), 1000)
    assert callers[1].call(b"abc", deadline()) == b"1:cba"
    assert {event.kind for event in events} == {"arrived"}


def test_a_silent_connection_is_probed(server: RendezvousServer) -> None:
    client = connect(server, 0)
    client.keep_alive()
    with socket.socket(fileno=os.dup(client.fileno())) as same:
        assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
    assert client.call(b"abc", deadline()) == b"0:cba"


def test_two_callers_with_one_number(server: RendezvousServer) -> None:
    first = connect(server, 1)
    with pytest.raises(RendezvousError, match="two processes claim to be rank 1"):
        connect(server, 1)
    assert first.call(b"abc", deadline()) == b"1:cba"


def test_a_refusal_ends_the_connection(server: RendezvousServer) -> None:
    client = connect(server, 1)
    with pytest.raises(RendezvousError, match=r"^rank 1 asks too much$"):
        client.call(b"refuse", deadline())
    with pytest.raises(RendezvousError, match="is gone"):
        client.call(b"abc", deadline())


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        (0, CALL + b"abc"),  # on a connection for worlds
        (CALLS, pack_report("initialised", "")),  # on one for calls
        (CALLS, b"G" + NUMBER.pack(0)),
        (CALLS, JOIN + NUMBER.pack(2)),  # for a second time
    ],
)
def test_messages_on_the_wrong_connection(server: RendezvousServer, channel: int, message: bytes) -> None:
    client = connect(server, 0, channel)
    client._send(message, deadline())
    with pytest.raises(RendezvousError, match="does not understand this message"):
        client._receive(CALL, deadline(), 1000)


def test_a_call_of_one_that_has_not_joined(server: RendezvousServer) -> None:
    with socket.create_connection(split_address(server.address), timeout=FAILSAFE_SECONDS) as client:
        mine = Identity(0, channel=CALLS)
        run_handshake(client, JOB, mine, LinkKind.RENDEZVOUS, Role.CONNECTS, deadline())
        send_frame(client, CALL + b"abc", deadline())
        assert receive_frame(client, deadline(), 1000)[:1] == REFUSED


def test_a_request_that_is_too_long(server: RendezvousServer) -> None:
    client = connect(server, 0)
    with pytest.raises(RendezvousError, match="is gone"):
        client.call(b"x" * CALL_LIMIT, deadline())


def test_a_refused_client_that_does_not_read_loses_its_connection(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_server, "CLOSING_SECONDS", 0.1)
    dropped: list[tuple[int, bool]] = []  # the events that the server waited for, and whether it had more

    def drop(connection: ServedConnection) -> None:
        dropped.append((connection.interest, bool(connection.outgoing)))
        ConnectionServer._drop(server, connection)

    monkeypatch.setattr(server, "_drop", drop)
    client = connect(server, 0)
    with socket.socket(fileno=os.dup(client.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(12):
            send_frame(same, CALL + b"x" * (MEBIBYTE - 2), deadline())
        same.sendall(pack_frame(CALL + b"refuse") + pack_frame(CALL + b"not read"))
        wait_until(lambda: bool(dropped), "the server closes the connection")
    assert dropped == [(selectors.EVENT_WRITE, True)]
    assert connect(server, 0).call(b"abc", deadline()) == b"0:cba"


def test_a_server_without_a_service() -> None:
    with RendezvousServer("127.0.0.1:0", JOB, FAILSAFE_SECONDS) as server:
        client = connect(server, 0)
        with pytest.raises(RendezvousError, match="does not understand this message"):
            client.call(b"abc", deadline())
