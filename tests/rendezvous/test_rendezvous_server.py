"""The rendezvous serves ranks, also behind collectors, rejects everybody else, and names missing ranks."""

from __future__ import annotations

import socket
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest
from collected_hosts import GARBAGE, JOB, Start
from handshakes import run_handshake
from hypothesis import HealthCheck, given, settings
from launching import FAILSAFE_SECONDS, deadline

from sirtaki.bindings.bootstrap.connection.address import split_address
from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, receive_frame
from sirtaki.bindings.bootstrap.job import Identity, LinkKind, RendezvousError, RendezvousTimeout, Role
from sirtaki.bindings.bootstrap.messages import PAYLOAD_LIMIT, RankEvent
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

DIRECT, COLLECTED = 1, 3  # ranks of JOB, without a collector and with a collector


@pytest.mark.parametrize("server", ["unix:@sirtaki-test-store", "127.0.0.1:0", "localhost:0"])
def test_every_rank_gets_all_payloads_in_order_of_rank(start: Start, server: str) -> None:
    hosts = start(server=server)
    for generation in (1, 2):
        clients = hosts.all(generation)
        assert len({client.session for client in clients}) == 1
        for payloads in (
            [b"%d of %d" % (rank, generation) for rank in range(JOB.size)],
            [bytes([rank]) * PAYLOAD_LIMIT for rank in range(JOB.size)],
            [b""] * JOB.size,
        ):
            assert hosts.gather_all(clients, payloads) == [payloads] * JOB.size
        for client in clients:
            client.report("initialised")
            client.report("finished")
            client.close()
    finished = hosts.wait_for("finished", 2 * JOB.size)
    assert {(one.rank, one.generation) for one in finished} == {(r, g) for r in range(6) for g in (1, 2)}
    assert {event.kind for event in hosts.events} == {"arrived", "initialised", "finished"}


def test_an_answer_is_held_once_for_all_ranks_that_have_not_read_it() -> None:
    job = replace(JOB, size=24)
    arrived: list[RankEvent] = []
    with (
        closing(RendezvousServer("unix:@sirtaki-test-answers", job, on_event=arrived.append)) as server,
        ExitStack() as opened,
    ):

        def connect(rank: int) -> RendezvousClient:
            return RendezvousClient.connect(server.address, job, Identity(rank, 1), FAILSAFE_SECONDS)

        with ThreadPoolExecutor(job.size) as pool:
            connecting = [pool.submit(connect, rank) for rank in range(job.size)]
            while not all(one.done() for one in connecting):
                server.poll(0.01)
        clients = [opened.enter_context(closing(one.result())) for one in connecting]
        tracemalloc.start()
        try:
            for number, client in enumerate(clients, start=1):
                frame = Frame(MessageKind.GATHER, payload=bytes(PAYLOAD_LIMIT))
                client.send_message(frame, time.monotonic() + 60)
                while len(arrived) < number:
                    server.poll(FAILSAFE_SECONDS)
            assert tracemalloc.get_traced_memory()[0] < 4 * job.size * PAYLOAD_LIMIT
        finally:
            tracemalloc.stop()


def test_a_payload_beyond_the_limit_is_refused_at_the_caller(start: Start) -> None:
    with pytest.raises(ValueError, match="at most 65536 bytes, not 65537"):
        start().connect(DIRECT).all_gather(b"x" * (PAYLOAD_LIMIT + 1))


def test_events_tell_how_each_rank_fares(start: Start) -> None:
    """Ranks 1 and 2 end without a report."""
    hosts = start()
    clients = hosts.all()
    hosts.gather_all(clients, [b""] * JOB.size)
    for rank in (0, COLLECTED):
        clients[rank].report("aborted", "ValueError: \x1b[31mbad\x07")
    for rank in (1, 2, 5):
        clients[rank].report("initialised")
    clients[4].report("peer_lost", "rank 3 was lost")
    clients[5].report("finished")
    assert {event.rank for event in hosts.wait_for("arrived", JOB.size)} == set(range(JOB.size))
    aborted = sorted(hosts.wait_for("aborted", 2), key=lambda event: event.rank)
    assert aborted == [RankEvent("aborted", rank, 1, "ValueError: ?[31mbad?") for rank in (0, COLLECTED)]
    assert hosts.wait_for("peer_lost") == [RankEvent("peer_lost", 4, 1, "rank 3 was lost")]
    assert hosts.wait_for("finished") == [RankEvent("finished", 5, 1)]
    for client in clients:
        client.close()
    assert {event.rank for event in hosts.wait_for("disconnected", 2)} == {1, 2}
    assert hosts.works()
    assert len(hosts.wait_for("disconnected")) == 2


def test_a_report_after_the_server_has_gone_is_harmless(start: Start) -> None:
    hosts = start()
    client = hosts.connect(DIRECT)
    hosts.server.close()
    for _ in range(3):
        client.report("aborted", "too late")
    with pytest.raises(RendezvousError, match=r"launcher \(hvdrun\), or rank 0, has ended"):
        client.all_gather(b"")


def test_ranks_that_do_not_come_are_named_at_the_deadline(start: Start) -> None:
    hosts = start(start_timeout=0.5)
    waiting = [hosts.gather(client) for client in hosts.all(without=[0, 5])]
    for answer in waiting:
        with pytest.raises(RendezvousTimeout, match="4 of 6 ranks are here; waiting for ranks 0 and 5"):
            answer.result(FAILSAFE_SECONDS)
    assert hosts.wait_for("overdue")[0].missing == (0, 5)
    for late in (0, 5):
        with pytest.raises(RendezvousError, match="the other ranks gave up before: 4 of 6 ranks are here"):
            hosts.connect(late).all_gather(b"")


@pytest.mark.parametrize("has_gathered", [False, True])
@pytest.mark.parametrize("rank", [DIRECT, COLLECTED])
def test_a_rank_that_goes_is_missed_at_once(start: Start, rank: int, has_gathered: bool) -> None:
    hosts = start()
    clients = hosts.all()
    if has_gathered:
        hosts.gather_all(clients, [b""] * JOB.size)
    waiting = [hosts.gather(client) for other, client in enumerate(clients) if other != rank]
    clients[rank].close()
    text = rf"rank {rank} has gone \(its process ended, or its init failed\)"
    for answer in waiting:
        with pytest.raises(RendezvousError, match=text):
            answer.result(FAILSAFE_SECONDS)
    assert hosts.works()


@pytest.mark.parametrize("rank", [DIRECT, COLLECTED])
def test_the_text_of_an_abort_reaches_those_who_wait(start: Start, rank: int) -> None:
    hosts = start()
    waiting = hosts.gather(hosts.connect(0))
    hosts.wait_for("arrived")
    leaving = hosts.connect(rank)
    leaving.report("aborted", "it found no memory")
    leaving.close()
    with pytest.raises(RendezvousError, match=f"but rank {rank} gave up: it found no memory"):
        waiting.result(FAILSAFE_SECONDS)


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_ended_is_missed_whenever_the_others_come(start: Start, before: bool) -> None:
    hosts = start()
    if before:
        hosts.server.rank_ended(2, "has ended (exit code 0)")
    waiting = hosts.gather(hosts.connect(0))
    if not before:
        hosts.wait_for("arrived")
        hosts.server.rank_ended(2, "has ended (exit code 0)")
    with pytest.raises(RendezvousError, match=r"rank 2 has ended \(exit code 0\)"):
        waiting.result(FAILSAFE_SECONDS)


@pytest.mark.parametrize(
    ("changes", "rank", "text"),
    [
        ({"key": b"x" * 32}, 2, "its key or its job is another one"),
        ({"id": "other"}, 2, "belongs to another job than rank 2"),
        ({"version": "2.0"}, 2, "the rendezvous runs sirtaki 1.0, but rank 2 runs sirtaki 2.0"),
        ({"size": 4}, 2, "rank 2 says that the job has 4 ranks, but it has 6"),
        ({}, 6, "there is no rank 6 in a job of 6 ranks: they are 0 to 5"),
    ],
    ids=["key", "job", "version", "size", "rank"],
)
@pytest.mark.parametrize("host", [0, 1])
def test_who_does_not_belong_is_refused_and_the_others_go_on(
    start: Start, host: int, changes: dict[str, object], rank: int, text: str
) -> None:
    hosts = start()
    with pytest.raises(RendezvousError, match=text):
        hosts.connect(rank, host=host, job=replace(JOB, **changes)).all_gather(b"")  # type: ignore[arg-type]
    if host and changes.keys() & {"key", "id", "version"}:
        assert not [event for event in hosts.events if event.kind == "refused"]  # the server has seen none
    else:
        assert hosts.wait_for("refused")
    for client in hosts.clients:  # whose place was refused
        with pytest.raises(RendezvousError, match="is gone"):
            client._receive({MessageKind.GATHERED}, deadline())
    assert hosts.works()


def test_negative_ranks_are_refused(start: Start) -> None:
    hosts = start(job=replace(JOB, size=3))
    with pytest.raises(RendezvousError, match="no rank -1"):
        hosts.connect(-1)
    assert hosts.works()


@pytest.mark.parametrize(("rank", "host"), [(0, 0), (1, 0), (2, 1), (2, 2)])
def test_two_processes_with_one_rank_number(start: Start, rank: int, host: int) -> None:
    hosts = start()
    first = hosts.gather(hosts.connect(rank), b"first")
    hosts.wait_for("arrived")
    with pytest.raises(RendezvousError, match=f"two processes claim to be rank {rank}"):
        hosts.connect(rank, host=host).all_gather(b"")
    others = [hosts.gather(client) for client in hosts.all(without=[rank])]
    assert [answer.result(FAILSAFE_SECONDS)[rank] for answer in (first, *others)] == [b"first"] * JOB.size


def test_a_failure_of_a_rank_that_does_not_exist_is_refused(start: Start) -> None:
    client = start().connect(DIRECT)
    client.send_message(Frame.of(MessageKind.FAILED, "it was lost", 99), deadline())
    with pytest.raises(RendezvousError, match="there is no rank 99 in this job"):
        client._receive({MessageKind.GATHERED}, deadline())


def test_a_rank_that_has_given_its_payload_cannot_give_another(start: Start) -> None:
    client = start().connect(DIRECT)
    for _ in range(2):
        client.send_message(Frame(MessageKind.GATHER), deadline())
    with pytest.raises(RendezvousError, match="two processes claim to be rank 1"):
        client._receive({MessageKind.GATHERED}, deadline())


@given(garbage=GARBAGE)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("knows_key", [False, True])
def test_garbage_ends_only_its_connection(start: Start, knows_key: bool, host: int, garbage: bytes) -> None:
    hosts = start()
    with hosts.visit(host) as client:
        if knows_key:
            mine = Identity(2, 1)
            run_handshake(client, JOB, mine, LinkKind.RENDEZVOUS, Role.CONNECTS, deadline())
        with suppress(OSError):
            client.sendall(garbage)
        assert hosts.works()


def test_a_message_that_is_too_long_is_not_read(start: Start) -> None:
    hosts = start()
    with hosts.visit() as client:
        run_handshake(client, JOB, Identity(0, 1), LinkKind.RENDEZVOUS, Role.CONNECTS, deadline())
        client.sendall(Frame(MessageKind.JOIN).pack()[:-4] + b"\xff\xff\xff\xff")
        refusal = Frame.of(MessageKind.REJECTED, "JOIN has 4294967295 bytes where 0 are allowed")
        assert receive_frame(client, deadline(), MessageKind) == refusal
    assert hosts.wait_for("refused")[0].text == refusal.text
    assert hosts.works()


def test_nobody_listens() -> None:
    with pytest.raises(RendezvousError, match=r"launcher \(hvdrun\) of this job is gone"):
        RendezvousClient.connect("unix:@sirtaki-nobody", JOB, Identity(0, 1), FAILSAFE_SECONDS)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RendezvousTimeout, match=f"nobody answers at {address}"):
            RendezvousClient.connect(address, JOB, Identity(0, 1), 0.2)


def test_a_server_that_is_silent_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RendezvousTimeout, match="did not answer in time"):
            RendezvousClient.connect(address, JOB, Identity(0, 1), 0.2)


def test_where_a_server_may_listen() -> None:
    with pytest.raises(RendezvousError, match="the ranks need a common key"):
        RendezvousServer("0.0.0.0:0", replace(JOB, key=b""))
    RendezvousServer("127.0.0.1:0", replace(JOB, key=b"")).close()
    with pytest.raises(RendezvousError, match="there is no host"):
        RendezvousServer("no-such-host.invalid:0", JOB)
    first = RendezvousServer("127.0.0.1:0", JOB)
    with pytest.raises(RendezvousError, match=r"cannot listen at .*: Address already in use"):
        RendezvousServer(first.address, JOB)
    first.close()


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:x", "host:65536", "host:-1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="an address is written host:port"):
        split_address(address)


def test_addresses() -> None:
    assert split_address("host:80") == ("host", 80)
    assert split_address("[::1]:80") == ("::1", 80)
