"""A collector whose connection to the server breaks continues on another one, and no message is lost."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from collected_hosts import JOB, CollectedHosts, collector_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import FAILSAFE_SECONDS, wait_until
from middle_box import DOWN, UP, MiddleBox

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.bindings.bootstrap.job import CALLS, Identity, RendezvousError
from sirtaki.bindings.bootstrap.messages import PAYLOAD_LIMIT, RankEvent
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server import clients as server_clients
from sirtaki.bindings.bootstrap.server import rendezvous_collector
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

Start = Callable[..., tuple[CollectedHosts, MiddleBox]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[tuple[CollectedHosts, MiddleBox]] = []

    def start_one(**options: object) -> tuple[CollectedHosts, MiddleBox]:
        boxes: list[MiddleBox] = []

        def via(address: str) -> str:
            if not boxes:
                boxes.append(MiddleBox(address))
            return boxes[0].address

        hosts = CollectedHosts(via=via, **options)  # type: ignore[arg-type]
        started.append((hosts, boxes[0]))
        return started[-1]

    yield start_one
    for hosts, box in started:
        hosts.close()
        box.close()


def initialised(hosts: CollectedHosts) -> list[RendezvousClient]:
    clients = hosts.all()
    hosts.gather_all(clients, [b""] * JOB.size)
    for client in clients:
        client.report("initialised")
    hosts.wait_for("initialised", JOB.size)
    return clients


@pytest.mark.parametrize("resets", [False, True])
def test_reports_after_an_interruption_arrive(start: Start, resets: bool) -> None:
    hosts, box = start()
    clients = initialised(hosts)
    box.cut(resets)
    clients[2].report("aborted", "ValueError: bad")
    clients[4].report("peer_lost", "rank 2 was lost")
    assert hosts.wait_for("aborted") == [RankEvent("aborted", 2, 1, "ValueError: bad")]
    assert hosts.wait_for("peer_lost") == [RankEvent("peer_lost", 4, 1, "rank 2 was lost")]
    clients[5].close()
    assert hosts.wait_for("disconnected") == [RankEvent("disconnected", 5, 1)]
    assert hosts.lines == [[], []]
    assert hosts.works()


def test_reports_that_were_lost_on_the_way_arrive_once(start: Start) -> None:
    hosts, box = start()
    clients = initialised(hosts)
    box.lose(UP)
    clients[2].report("aborted", "ValueError: bad")
    clients[3].report("finished")
    box.wait_for_loss(UP, len("aborted\0ValueError: bad") + len("finished"))
    box.cut()
    hosts.wait_for("aborted")
    hosts.wait_for("finished")
    assert hosts.works()
    assert [event for event in hosts.events if event.kind not in ("arrived", "initialised")] == [
        RankEvent("aborted", 2, 1, "ValueError: bad"),
        RankEvent("finished", 3, 1),
    ]


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_an_allgather_survives_the_loss_of_its_messages(start: Start, direction: int) -> None:
    hosts, box = start()
    clients = hosts.all()
    hosts.gather_all(clients, [b""] * JOB.size)
    payloads = [bytes([rank]) * PAYLOAD_LIMIT for rank in range(JOB.size)]
    box.lose(direction)
    answers = [hosts.gather(*pair) for pair in zip(clients, payloads, strict=True)]
    box.wait_for_loss(direction)
    box.cut()
    assert [answer.result(FAILSAFE_SECONDS) for answer in answers] == [payloads] * JOB.size


def test_an_encrypted_answer_comes_with_the_new_connection(start: Start) -> None:
    """The small messages that are sent again share a record of TLS, which the socket shows only once."""
    hosts, box = start(job=replace(JOB, encrypt=True))
    clients = hosts.all()
    for _ in range(3):
        box.lose(DOWN)
        answers = [hosts.gather(client) for client in clients]
        assert answers[0].result(FAILSAFE_SECONDS) == [b""] * JOB.size  # this one has no collector
        box.cut()
        assert [answer.result(FAILSAFE_SECONDS) for answer in answers] == [[b""] * JOB.size] * JOB.size


def test_a_call_is_answered_once(start: Start) -> None:
    requests: list[bytes] = []

    def answer(rank: int, request: Frame) -> bytes:
        requests.append(request.payload)
        return request.payload[::-1]

    hosts, box = start(on_call=answer)
    client = hosts.connect(3, channel=CALLS)
    for direction in (UP, DOWN):
        box.lose(direction)
        request = b"%d" % direction * 100_000
        frame = Frame(MessageKind.PIECE, payload=request)
        pending = hosts._pool.submit(client.call, frame, time.monotonic() + FAILSAFE_SECONDS)
        box.wait_for_loss(direction, 1)
        box.cut()
        assert pending.result(FAILSAFE_SECONDS).payload == request[::-1]
    assert requests == [b"0" * 100_000, b"1" * 100_000]


@given(steps=st.lists(st.sampled_from(["report", "lose up", "lose down", "cut", "reset"]), max_size=12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_messages_arrive_once_and_in_order_whatever_is_cut(start: Start, steps: list[str]) -> None:
    received: list[tuple[int, Frame]] = []
    hosts, box = start(on_message=lambda rank, frame: received.append((rank, frame)))
    client = hosts.connect(3, generation=0)
    sent: list[tuple[int, Frame]] = []
    for step in [*steps, "report", "cut", "report"]:
        if step == "report":
            sent.append((3, Frame(MessageKind.FENCE, payload=bytes(1000), number=len(sent))))
            client.send_message(sent[-1][1], time.monotonic() + FAILSAFE_SECONDS)
        elif step.startswith("lose"):
            box.lose(UP if step == "lose up" else DOWN)
        else:
            box.cut(resets=step == "reset")
    wait_until(lambda: len(received) >= len(sent), "all have arrived")
    end = Frame(MessageKind.END)
    hosts.server.send_message(3, end)
    assert client.receive_message(time.monotonic() + FAILSAFE_SECONDS) == end
    assert received == sent
    assert hosts.lines == [[], []]


def test_a_server_that_is_not_reached_again_is_reported_and_its_ranks_are_gone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_collector, "_RESUME_SECONDS", 0.5)
    monkeypatch.setattr(server_clients, "KEPT_SECONDS", 0.7)
    hosts, box = start()
    clients = initialised(hosts)
    box.refuse()
    box.cut()
    for rank in range(2, JOB.size):
        with pytest.raises(RendezvousError, match="the rendezvous of this job is gone"):
            clients[rank]._receive({MessageKind.GATHERED}, time.monotonic() + FAILSAFE_SECONDS)
    text = re.compile(
        r"the connection from this host to the rendezvous has ended, and reports of its ranks may be lost "
        r"until their next hvd\.init\(\): it could not be replaced within 0\.5 s: .*"
    )
    for lines in hosts.lines:
        (line,) = lines
        assert text.fullmatch(line)
    assert {event.rank for event in hosts.wait_for("disconnected", 4)} == {2, 3, 4, 5}
    with pytest.raises(RendezvousError, match=r"\(the connection to the agent of its host ended\)"):
        clients[0].all_gather(b"")


def test_another_server_does_not_continue_a_connection() -> None:
    """A server that has ended without a word, and another one at the same address."""
    with RendezvousServer("127.0.0.1:0", JOB, FAILSAFE_SECONDS, accepts_collectors=True) as first:
        box = MiddleBox(first.address)
        collector, lines = collector_of(box.address)
        with closing(box), collector:
            client = RendezvousClient.connect(collector.address, JOB, Identity(2, 1), FAILSAFE_SECONDS)
            with (
                closing(client),
                RendezvousServer("127.0.0.1:0", JOB, FAILSAFE_SECONDS, accepts_collectors=True) as second,
            ):
                host, port = second.address.split(":")
                box._target = host, int(port)
                box.cut()
                with pytest.raises(RendezvousError, match="is gone"):
                    client._receive({MessageKind.GATHERED}, time.monotonic() + FAILSAFE_SECONDS)
    assert len(lines) == 1
    assert lines[0].endswith("its connection was interrupted for too long, or belonged to another rendezvous")


def test_the_kernel_gives_a_silent_connection_up(start: Start) -> None:
    hosts, _ = start()
    initialised(hosts)
    for collector in hosts.collectors:
        assert collector._server is not None
        connection = collector._server.connection
        assert isinstance(connection, socket.socket)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 20
