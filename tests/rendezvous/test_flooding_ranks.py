"""A rank that sends more than is taken, or asks without reading, waits itself, and harms no other one."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
from collected_hosts import JOB, Start, collector_of
from handshakes import run_handshake
from launching import FAILSAFE_SECONDS, deadline, wait_until

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, receive_frame, send_frame
from sirtaki.bindings.bootstrap.job import CALLS, Identity, LinkKind, RendezvousError, Role
from sirtaki.bindings.bootstrap.messages import PAYLOAD_LIMIT, REPORTS, RankEvent, pack_welcome
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server import connection_server, rendezvous_collector
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

FLOOD = Frame(MessageKind.ENLIST, payload=bytes(1000)).pack()


def send_until_it_blocks(client: RendezvousClient, frame: bytes) -> int:
    """Sends copies of a frame until nobody takes more; returns the bytes that have been sent."""
    connection, sent = client.connection, 0
    connection.settimeout(2.0)
    with suppress(TimeoutError):
        while True:
            sent += connection.send(frame[sent % len(frame) :])
    return sent


def test_a_flood_leaves_the_collector_room_for_the_report_of_another_rank() -> None:
    """Acts as a server that does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        collector, _ = collector_of(f"127.0.0.1:{listener.getsockname()[1]}")
        with collector, listener.accept()[0] as line:
            run_handshake(line, JOB, Identity(-1), LinkKind.RENDEZVOUS, Role.ACCEPTS, deadline())
            receive_frame(line, deadline(), MessageKind)
            send_frame(line, pack_welcome(b"s" * 16), deadline())
            first, second = (
                RendezvousClient.connect(collector.address, JOB, Identity(rank, 1), FAILSAFE_SECONDS)
                for rank in (2, 3)
            )
            with closing(first), closing(second):
                sent = send_until_it_blocks(first, FLOOD)
                assert sent > rendezvous_collector.RANK_LIMIT
                assert collector._server is not None
                kept = collector._server.unconfirmed
                assert rendezvous_collector.RANK_LIMIT <= kept[0] < rendezvous_collector.RANK_LIMIT + 2000
                second.report("aborted", "ValueError: bad")
                number, before = REPORTS.index("aborted"), 0
                report = Frame.of(MessageKind.EVENT, "ValueError: bad", number=number).pack()
                while (frame := receive_frame(line, deadline(), MessageKind)).payload != report:
                    before += len(frame.payload)
                assert (frame.kind, frame.number) == (MessageKind.SAID, 1)
                assert before < rendezvous_collector.RANK_LIMIT + 2000


def test_all_that_a_flood_contains_arrives(start: Start) -> None:
    received: list[int] = []
    hosts = start(on_message=lambda rank, frame: received.append(frame.number))
    client = hosts.connect(3, generation=0)
    count = 4 * rendezvous_collector.RANK_LIMIT // 1000
    for number in range(count):
        client.send_message(Frame(MessageKind.ENLIST, payload=bytes(1000), number=number), deadline())
    client.close()
    wait_until(lambda: len(received) >= count, "all have come")
    assert received == list(range(count))


@pytest.mark.parametrize("is_collected", [False, True])
def test_a_rank_that_asks_without_reading_the_answers_is_not_asked_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_collected: bool
) -> None:
    monkeypatch.setattr(connection_server, "QUEUE_LIMIT", 2_000_000)
    asked: list[int] = []

    def answer(rank: int, request: Frame) -> bytes:
        asked.append(request.number)
        return request.number.to_bytes(2, "big") + bytes(MessageKind.REPLY.limit - 1000)

    hosts = start(on_call=answer)
    rank, count = (2 if is_collected else 0), 60
    client = hosts.connect(rank, channel=CALLS)
    for number in range(count):
        send_frame(client.connection, Frame(MessageKind.READ, number=number), deadline())
    assert hosts.works()
    other = hosts.connect(rank + 1, channel=CALLS)
    assert other.call(Frame(MessageKind.READ, number=256), deadline()).payload[:2] == b"\1\0"
    assert len(asked) < count // 2
    for number in range(count):
        reply = client._receive({MessageKind.REPLY}, deadline())
        assert reply.payload[:2] == number.to_bytes(2, "big")
    assert [one for one in asked if one < 256] == list(range(count))


@pytest.mark.parametrize("is_collected", [False, True])
def test_the_last_report_of_a_rank_is_read_although_it_takes_no_message_any_more(
    start: Start, is_collected: bool
) -> None:
    hosts = start()
    rank = 2 if is_collected else 1
    client = hosts.connect(rank, generation=0)
    server = hosts.collectors[0] if is_collected else hosts.server
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        go_on.wait(FAILSAFE_SECONDS)
        (connection,) = [one for one in _connections(server) if one.peer and one.peer.rank == rank]
        connection.outgoing += Frame(MessageKind.TABLE).pack()
        server._flush_or_drop(connection)

    server._call_soon(hold)
    assert reached.wait(FAILSAFE_SECONDS)
    client.report("aborted", "ValueError: bad")
    client.close()
    go_on.set()
    assert hosts.wait_for("aborted") == [RankEvent("aborted", rank, 0, "ValueError: bad")]


def _connections(server: connection_server.ConnectionServer) -> list[connection_server.ServedConnection]:
    registered = [key.data for key in server._selector.get_map().values()]
    return [one for one in registered if isinstance(one, connection_server.ServedConnection)]


def test_a_rank_reports_a_few_times_only() -> None:
    events: list[RankEvent] = []
    with RendezvousServer("127.0.0.1:0", JOB, FAILSAFE_SECONDS, events.append) as server:
        client = RendezvousClient.connect(server.address, JOB, Identity(1, 1), FAILSAFE_SECONDS)
        with closing(client):
            for _ in range(9):
                client.report("initialised")
            with pytest.raises(RendezvousError, match="rank 1 has sent more than 8 reports"):
                client._receive({MessageKind.GATHERED}, deadline())
    assert [event.kind for event in events] == ["initialised"] * 8 + ["refused", "disconnected"]


def test_a_rank_waits_for_the_others_before_it_contributes_again() -> None:
    with RendezvousServer("127.0.0.1:0", JOB, FAILSAFE_SECONDS) as server:
        client = RendezvousClient.connect(server.address, JOB, Identity(1, 1), FAILSAFE_SECONDS)
        with closing(client):
            for number in range(2):
                frame = Frame(MessageKind.GATHER, payload=bytes(PAYLOAD_LIMIT), number=number)
                send_frame(client.connection, frame, deadline())
            with pytest.raises(RendezvousError, match="rank 1 has not waited for the others"):
                client._receive({MessageKind.GATHERED}, deadline())


def test_a_flood_does_not_delay_the_other_ranks_of_the_host(start: Start) -> None:
    stop = threading.Event()
    hosts = start(on_message=lambda rank, payload: None)
    flooding = hosts.connect(2, generation=0)

    def flood() -> None:
        while not stop.is_set():
            flooding.send_message(Frame(MessageKind.ENLIST, payload=bytes(PAYLOAD_LIMIT)), deadline())

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(flood)
        try:
            assert hosts.works()
        finally:
            stop.set()
        done.result(FAILSAFE_SECONDS)
