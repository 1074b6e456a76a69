"""Ranks behind the collectors of their hosts have what they have with connections of their own."""

from __future__ import annotations

import re
import select
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
from collected_hosts import EACH, JOB, Start, collector_of
from handshakes import run_handshake
from launching import FAILSAFE_SECONDS, deadline, wait_until

from sirtaki.bindings.bootstrap import rendezvous_client
from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, receive_frame, send_frame
from sirtaki.bindings.bootstrap.job import (
    Identity,
    LinkKind,
    RendezvousError,
    RendezvousTimeout,
    Role,
)
from sirtaki.bindings.bootstrap.messages import (
    PAYLOAD_LIMIT,
    REPORTS,
    pack_arrival,
    pack_delivery,
    pack_payloads,
    pack_welcome,
)
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server import rendezvous_collector
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer


def test_a_failure_reaches_all_ranks_and_names_the_culprit(start: Start) -> None:
    hosts = start()
    clients = hosts.all()
    hosts.gather_all(clients, [b""] * JOB.size)
    waiting = {rank: hosts.gather(clients[rank]) for rank in range(JOB.size) if rank not in (3, 5)}
    first = clients[3].report_failure("it lost rank 4", 4)
    assert first is not None
    assert (str(first), first.culprit) == ("it lost rank 4", 4)
    for answer in waiting.values():
        with pytest.raises(RendezvousError, match=r"^it lost rank 4$") as error:
            answer.result(FAILSAFE_SECONDS)
        assert error.value.culprit == 4
    with pytest.raises(RendezvousError, match=r"^it lost rank 4$"):
        clients[5].raise_failure(deadline())


def test_the_ranks_of_a_lost_host_are_named_and_its_own_learn_it(start: Start) -> None:
    hosts = start()
    clients = hosts.all()
    hosts.gather_all(clients, [b""] * JOB.size)
    waiting = [hosts.gather(client) for client in clients if client is not clients[5]]
    hosts.collectors[1].close()
    for answer in waiting[:4]:
        with pytest.raises(
            RendezvousError, match=r"rank [45] has gone \(the connection to the agent of its host ended\)"
        ):
            answer.result(FAILSAFE_SECONDS)
    with pytest.raises(RendezvousError, match="the rendezvous of this job is gone"):
        waiting[4].result(FAILSAFE_SECONDS)


def test_the_end_of_the_server_reaches_the_ranks_of_all_hosts(start: Start) -> None:
    hosts = start()
    clients = hosts.all()
    hosts.gather_all(clients, [b""] * JOB.size)
    waiting = [hosts.gather(client) for client in clients[:-1]]
    hosts.server.close()
    for answer in waiting:
        with pytest.raises(RendezvousError, match="the rendezvous of this job is gone"):
            answer.result(FAILSAFE_SECONDS)


def test_who_is_refused_is_reported_by_the_collector_alone(start: Start) -> None:
    hosts = start()
    with pytest.raises(RendezvousError, match="its key or its job is another one"):
        hosts.connect(2, job=replace(JOB, key=b"x" * 32))
    lines = hosts.lines[0]
    wait_until(lambda: any("does not know the key of this job" in line for line in lines), "it is reported")
    assert all(line.startswith("the rendezvous on this host reports that it refused") for line in lines)
    assert not [event for event in hosts.events if event.kind == "refused"]


def test_a_rank_that_has_arrived_is_reported_before_the_others_of_its_host_come(start: Start) -> None:
    hosts = start()
    first = hosts.gather(hosts.connect(2), b"2")
    assert hosts.wait_for("arrived")[0].rank == 2
    others = [hosts.gather(client, b"") for client in hosts.all(without=[2])]
    assert [answer.result(FAILSAFE_SECONDS)[2] for answer in (first, *others)] == [b"2"] * JOB.size


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Frame.of(MessageKind.REJECTED, "there is no rank 6").pack(), "^there is no rank 6$"),
        (Frame.of(MessageKind.FAILED, "it lost rank 4", 4).pack(), "^it lost rank 4$"),
        (b"", "the rendezvous of this job is gone"),
    ],
    ids=["refused", "failed", "ended"],
)
def test_the_reason_for_the_end_of_a_connection_is_read_when_sending_fails(answer: bytes, text: str) -> None:
    sends: list[Callable[[RendezvousClient], object]] = [
        lambda client: client.all_gather(b""),
        lambda client: client.call(Frame(MessageKind.READ), deadline()),
    ]
    for send in sends:
        mine, other = socket.socketpair()
        with closing(RendezvousClient(mine, JOB, 6, FAILSAFE_SECONDS)) as client:
            other.sendall(answer)
            other.close()
            with pytest.raises(RendezvousError, match=text):
                send(client)


def test_messages_in_both_directions(start: Start) -> None:
    received: list[tuple[int, Frame]] = []
    hosts = start(on_message=lambda rank, frame: received.append((rank, frame)))
    client = hosts.connect(3, generation=0)
    up, down = Frame(MessageKind.FENCE, payload=b"up"), Frame(MessageKind.END, payload=b"down")
    client.send_message(up, deadline())
    wait_until(lambda: received == [(3, up)], "the message has come")
    hosts.server.send_message(3, down)
    assert client.receive_message(deadline()) == down


def test_the_addresses_of_a_rank_are_those_on_the_way_to_the_server(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source_towards(connection: socket.socket) -> list[str]:
        return [] if connection.family == socket.AF_UNIX else ["10.0.0.7", "fd00::7"]

    monkeypatch.setattr(rendezvous_client, "source_towards", source_towards)
    hosts = start()
    assert hosts.connect(2).own_addresses() == ["10.0.0.7", "fd00::7"]


def test_a_collector_encrypts_or_refuses_ranks_that_want_it(start: Start) -> None:
    hosts = start(job=replace(JOB, encrypt=True))
    payloads = [bytes([rank]) * PAYLOAD_LIMIT for rank in range(JOB.size)]
    assert hosts.gather_all(hosts.all(), payloads) == [payloads] * JOB.size
    text = "the setting encrypt is 1 on the rendezvous and 0 on rank 2"
    with pytest.raises(RendezvousError, match=text):
        RendezvousClient.connect(hosts.collectors[0].address, JOB, Identity(2, 2), FAILSAFE_SECONDS)


def test_a_server_that_a_collector_does_not_reach() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        collector, _ = collector_of(address, start_timeout=0.5)
        with collector:
            for rank in range(EACH):
                reason = re.escape(
                    f"the agent of this host cannot reach the rendezvous: nobody answers at {address}"
                )
                with pytest.raises(RendezvousTimeout, match=reason):
                    RendezvousClient.connect(collector.address, JOB, Identity(rank, 1), FAILSAFE_SECONDS)


def test_a_collector_that_waits_for_the_server_does_not_delay_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous_collector, "_CLOSE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        collector, _ = collector_of(f"127.0.0.1:{listener.getsockname()[1]}")
        collector.start()
        with listener.accept()[0] as silent:
            collector.close()
            assert collector._thread.is_alive()  # it still waits for an answer
            silent.sendall(b"\0" * 200)
            collector._thread.join(FAILSAFE_SECONDS)
            assert not collector._thread.is_alive()
    collector.close()


def test_a_collector_retries_while_the_server_closes_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(FAILSAFE_SECONDS)
        with collector_of(f"127.0.0.1:{listener.getsockname()[1]}")[0] as collector:
            for _ in range(4):  # `connect` gives up after three
                listener.accept()[0].close()
            with listener.accept()[0] as line:
                run_handshake(line, JOB, Identity(-1), LinkKind.RENDEZVOUS, Role.ACCEPTS, deadline())
                send_frame(line, pack_welcome(b"s" * 16), deadline())
                RendezvousClient.connect(collector.address, JOB, Identity(2, 1), FAILSAFE_SECONDS).close()


def test_a_collector_connects_again_for_the_next_init() -> None:
    job = replace(JOB, size=EACH)
    first = RendezvousServer("127.0.0.1:0", job, FAILSAFE_SECONDS, accepts_collectors=True).start()
    collector, _ = collector_of(first.address, job)

    def init(generation: int) -> list[RendezvousClient]:
        clients = [
            RendezvousClient.connect(collector.address, job, Identity(rank, generation), FAILSAFE_SECONDS)
            for rank in range(EACH)
        ]
        with ThreadPoolExecutor(EACH) as pool:
            answers = list(pool.map(lambda client: client.all_gather(client.session), clients))
        assert answers == [[clients[0].session] * EACH] * EACH
        return clients

    with collector:
        before = init(1)
        first.close()
        for client in before:
            with closing(client), pytest.raises(RendezvousError, match="is gone"):
                client._receive({MessageKind.GATHERED}, deadline())
        with RendezvousServer(first.address, job, FAILSAFE_SECONDS, accepts_collectors=True):
            after = init(2)
            assert after[0].session != before[0].session
            for client in after:
                client.close()


def said(number: int, frame: Frame) -> Frame:
    return Frame(MessageKind.SAID, payload=frame.pack(), number=number)


def test_the_messages_of_a_host_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acts as the server: each read has all that is needed for the next answer, and nothing comes twice."""
    monkeypatch.setattr(rendezvous_collector, "HOLD_SECONDS", FAILSAFE_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(EACH) as pool:
        collector, _ = collector_of(f"127.0.0.1:{listener.getsockname()[1]}")
        with collector, listener.accept()[0] as line:
            run_handshake(line, JOB, Identity(-1), LinkKind.RENDEZVOUS, Role.ACCEPTS, deadline())
            first = receive_frame(line, deadline(), MessageKind)
            assert (first.kind, first.number, len(first.payload)) == (MessageKind.JOIN_HOST, JOB.size, 16)
            send_frame(line, pack_welcome(b"s" * 16), deadline())
            mine = [Identity(rank, 1) for rank in (2, 3)]
            clients = [
                RendezvousClient.connect(collector.address, JOB, one, FAILSAFE_SECONDS) for one in mine
            ]
            answers = [pool.submit(clients[0].all_gather, b"payload")]
            wait_until(lambda: collector._contributors or select.select([line], [], [], 0)[0], "the first")
            assert not select.select([line], [], [], 0)[0]  # it is held for the second one
            answers.append(pool.submit(clients[1].all_gather, b"payload"))
            line.settimeout(FAILSAFE_SECONDS)
            joined = Frame(MessageKind.JOIN, number=JOB.size)
            expected = [
                frame
                for number in (0, 1)
                for frame in (pack_arrival(number, mine[number]), said(number, joined))
            ]
            expected += [said(number, Frame(MessageKind.GATHER, payload=b"payload")) for number in (0, 1)]
            assert line.recv(1000) == b"".join(frame.pack() for frame in expected)
            everything = pack_payloads([b"%d" % rank for rank in range(JOB.size)]).pack(JOB.size)
            line.sendall(pack_delivery([0, 1], everything, JOB.size) + everything)
            for answer in answers:
                assert answer.result(FAILSAFE_SECONDS) == [b"%d" % rank for rank in range(JOB.size)]
            for number, client in enumerate(clients):
                client.report("initialised")
                report = Frame(MessageKind.EVENT, number=REPORTS.index("initialised"))
                assert line.recv(1000) == said(number, report).pack()
            clients[1].close()
            assert line.recv(1000) == Frame(MessageKind.LEFT, number=1).pack()
            clients[0].close()
