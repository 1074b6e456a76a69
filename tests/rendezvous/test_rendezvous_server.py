"""The rendezvous: ranks are served, connections of others are rejected, missing ranks are named."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest
from handshakes import run_handshake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.connection.address import split_address
from sirtaki.bindings.bootstrap.connection.wire import pack_frame, receive_frame
from sirtaki.bindings.bootstrap.job import Identity, Job, LinkKind, RendezvousError, RendezvousTimeout, Role
from sirtaki.bindings.bootstrap.messages import (
    GATHER,
    GATHERED,
    NUMBER,
    PAYLOAD_LIMIT,
    RankEvent,
    pack_failure,
)
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

JOB = Job("job", 3, b"k" * 32, "1.0")


class Rendezvous:
    """A running server, its events, and clients that operate at the same time."""

    def __init__(self, address: str, start_timeout: float = FAILSAFE_SECONDS) -> None:
        self.events: list[RankEvent] = []
        self.heard = threading.Condition()
        self.server = RendezvousServer(address, JOB, start_timeout, self.hear)
        self.clients: list[RendezvousClient] = []
        self.pool = ThreadPoolExecutor(8)

    def hear(self, event: RankEvent) -> None:
        with self.heard:
            self.events.append(event)
            self.heard.notify_all()

    def wait_for(self, kind: str, count: int = 1) -> list[RankEvent]:
        def found() -> list[RankEvent]:
            return [event for event in self.events if event.kind == kind]

        with self.heard:
            assert self.heard.wait_for(lambda: len(found()) >= count, FAILSAFE_SECONDS), self.events
        return found()

    def connect(self, rank: int, job: Job = JOB, generation: int = 1) -> RendezvousClient:
        client = RendezvousClient.connect(
            self.server.address, job, Identity(rank, generation), FAILSAFE_SECONDS
        )
        self.clients.append(client)
        return client

    def gather(self, client: RendezvousClient, payload: bytes = b"") -> Future[list[bytes]]:
        return self.pool.submit(client.all_gather, payload)

    def works(self, generation: int = 99) -> bool:
        """Returns whether the server still serves a whole job."""
        clients = [self.connect(rank, generation=generation) for rank in range(JOB.size)]
        answers = [self.gather(client, b"%d" % rank) for rank, client in enumerate(clients)]
        return all(answer.result(FAILSAFE_SECONDS) == [b"0", b"1", b"2"] for answer in answers)


def connect(rendezvous: Rendezvous) -> socket.socket:
    """Returns a connection that has sent nothing yet."""
    return socket.create_connection(split_address(rendezvous.server.address), timeout=FAILSAFE_SECONDS)


@pytest.fixture
def start() -> Iterator[Callable[..., Rendezvous]]:
    started: list[Rendezvous] = []

    def start_one(address: str = "127.0.0.1:0", start_timeout: float = FAILSAFE_SECONDS) -> Rendezvous:
        started.append(Rendezvous(address, start_timeout))
        started[-1].server.start()
        return started[-1]

    yield start_one
    for rendezvous in started:
        rendezvous.server.close()
        for client in rendezvous.clients:
            client.close()
        rendezvous.pool.shutdown()


@pytest.mark.parametrize("address", ["unix:@sirtaki-test-store", "127.0.0.1:0", "localhost:0"])
def test_every_rank_gets_all_payloads_in_order_of_rank(
    start: Callable[..., Rendezvous], address: str
) -> None:
    rendezvous = start(address)
    clients = [rendezvous.connect(rank) for rank in (2, 0, 1)]
    for payloads in ([b"", b"one", b"two"], [bytes([rank]) * PAYLOAD_LIMIT for rank in range(3)]):
        answers = [
            rendezvous.gather(client, payloads[rank]) for client, rank in zip(clients, (2, 0, 1), strict=True)
        ]
        assert [answer.result(FAILSAFE_SECONDS) for answer in answers] == [payloads] * 3


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
                client._send(GATHER + NUMBER.pack(0) + bytes(PAYLOAD_LIMIT), time.monotonic() + 60)
                while len(arrived) < number:
                    server.poll(FAILSAFE_SECONDS)
            assert tracemalloc.get_traced_memory()[0] < 4 * job.size * PAYLOAD_LIMIT
        finally:
            tracemalloc.stop()


def test_a_payload_beyond_the_limit_is_refused_at_the_caller(start: Callable[..., Rendezvous]) -> None:
    with pytest.raises(ValueError, match="at most 65536 bytes, not 65537"):
        start().connect(0).all_gather(b"x" * (PAYLOAD_LIMIT + 1))


def test_events_tell_how_each_rank_fares(start: Callable[..., Rendezvous]) -> None:
    rendezvous = start()
    clients = [rendezvous.connect(rank) for rank in range(3)]
    for answer in [rendezvous.gather(client) for client in clients]:
        answer.result(FAILSAFE_SECONDS)
    clients[0].report("initialised")
    clients[0].report("finished")
    clients[1].report("aborted", "ValueError: \x1b[31mbad\x07")
    clients[2].report("peer_lost", "rank 1 was lost")
    assert {event.rank for event in rendezvous.wait_for("arrived", 3)} == {0, 1, 2}
    assert rendezvous.wait_for("finished")[0].rank == 0
    assert rendezvous.wait_for("aborted")[0] == RankEvent("aborted", 1, 1, "ValueError: ?[31mbad?")
    assert rendezvous.wait_for("peer_lost")[0].text == "rank 1 was lost"


def test_a_rank_that_goes_without_a_report_is_told_from_one_that_reported(
    start: Callable[..., Rendezvous],
) -> None:
    rendezvous = start()
    clients = [rendezvous.connect(rank) for rank in range(3)]
    for client in clients[:2]:
        client.report("initialised")
    clients[0].report("finished")
    for client in clients:
        client.close()
    assert rendezvous.wait_for("disconnected") == [RankEvent("disconnected", 1, 1)]


def test_a_report_after_the_server_has_gone_is_harmless(start: Callable[..., Rendezvous]) -> None:
    rendezvous = start()
    client = rendezvous.connect(0)
    rendezvous.server.close()
    for _ in range(3):
        client.report("aborted", "too late")
    with pytest.raises(RendezvousError, match=r"launcher \(hvdrun\), or rank 0, has ended"):
        client.all_gather(b"")


def test_ranks_that_do_not_come_are_named_at_the_deadline(start: Callable[..., Rendezvous]) -> None:
    rendezvous = start(start_timeout=0.2)
    waiting = rendezvous.gather(rendezvous.connect(1))
    with pytest.raises(RendezvousTimeout, match="1 of 3 ranks are here; waiting for ranks 0 and 2"):
        waiting.result(FAILSAFE_SECONDS)
    assert rendezvous.wait_for("overdue")[0].missing == (0, 2)
    with pytest.raises(RendezvousError, match="the other ranks gave up before: 1 of 3 ranks are here"):
        rendezvous.connect(0).all_gather(b"")


def test_a_rank_that_goes_is_missed_at_once(start: Callable[..., Rendezvous]) -> None:
    rendezvous = start()
    waiting = rendezvous.gather(rendezvous.connect(0))
    rendezvous.wait_for("arrived")
    rendezvous.connect(2).close()
    with pytest.raises(
        RendezvousError, match=r"but rank 2 has gone \(its process ended, or its init failed\)"
    ):
        waiting.result(FAILSAFE_SECONDS)
    assert rendezvous.works(generation=2)


def test_the_text_of_an_abort_reaches_those_who_wait(start: Callable[..., Rendezvous]) -> None:
    rendezvous = start()
    waiting = rendezvous.gather(rendezvous.connect(0))
    rendezvous.wait_for("arrived")
    leaving = rendezvous.connect(1)
    leaving.report("aborted", "it found no memory")
    leaving.close()
    with pytest.raises(RendezvousError, match="but rank 1 gave up: it found no memory"):
        waiting.result(FAILSAFE_SECONDS)


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_ended_is_missed_whenever_the_others_come(
    start: Callable[..., Rendezvous], before: bool
) -> None:
    rendezvous = start()
    if before:
        rendezvous.server.rank_ended(2, "has ended (exit code 0)")
    waiting = rendezvous.gather(rendezvous.connect(0))
    if not before:
        rendezvous.wait_for("arrived")
        rendezvous.server.rank_ended(2, "has ended (exit code 0)")
    with pytest.raises(RendezvousError, match=r"rank 2 has ended \(exit code 0\)"):
        waiting.result(FAILSAFE_SECONDS)


@pytest.mark.parametrize(
    ("job", "rank", "text"),
    [
        (replace(JOB, key=b"x" * 32), 0, "its key or its job is another one"),
        (replace(JOB, id="other"), 0, "belongs to another job than rank 0"),
        (replace(JOB, version="2.0"), 0, "the rendezvous runs sirtaki 1.0, but rank 0 runs sirtaki 2.0"),
        (replace(JOB, size=4), 1, "rank 1 says that the job has 4 ranks, but it has 3"),
        (JOB, 3, "no rank 3 in a job of 3 ranks: they are 0 to 2"),
        (JOB, -1, "no rank -1"),
    ],
    ids=["key", "job", "version", "size", "rank", "negative"],
)
def test_who_does_not_belong_is_refused_and_the_others_go_on(
    start: Callable[..., Rendezvous], job: Job, rank: int, text: str
) -> None:
    rendezvous = start()
    with pytest.raises(RendezvousError, match=text):
        rendezvous.connect(rank, job)
    assert rendezvous.wait_for("refused")
    assert rendezvous.works()


def test_two_processes_with_one_rank_number(start: Callable[..., Rendezvous]) -> None:
    rendezvous = start()
    for rank in range(2):
        first = rendezvous.connect(rank)
        with pytest.raises(RendezvousError, match=f"two processes claim to be rank {rank}"):
            rendezvous.connect(rank)
        first.close()
    assert rendezvous.works(generation=2)


def test_a_failure_of_a_rank_that_does_not_exist_is_refused(start: Callable[..., Rendezvous]) -> None:
    client = start().connect(1)
    deadline = time.monotonic() + FAILSAFE_SECONDS
    client._send(pack_failure(99, "it was lost"), deadline)
    with pytest.raises(RendezvousError, match="there is no rank 99 in this job"):
        client._receive(GATHERED, deadline, 1000)


def test_a_rank_that_has_given_its_payload_cannot_give_another(start: Callable[..., Rendezvous]) -> None:
    client = start().connect(1)
    deadline = time.monotonic() + FAILSAFE_SECONDS
    for _ in range(2):
        client._send(GATHER + NUMBER.pack(0), deadline)
    with pytest.raises(RendezvousError, match="two processes claim to be rank 1"):
        client._receive(GATHERED, deadline, 1000)


@given(garbage=st.binary(max_size=300))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_before_the_proof_harms_nobody(start: Callable[..., Rendezvous], garbage: bytes) -> None:
    rendezvous = start()
    with connect(rendezvous) as stranger:
        with suppress(OSError):
            stranger.sendall(garbage)
        assert rendezvous.works()


@given(garbage=st.one_of(st.binary(min_size=1, max_size=300), st.binary(max_size=80).map(pack_frame)))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_from_one_who_knows_the_key_ends_only_its_connection(
    start: Callable[..., Rendezvous], garbage: bytes
) -> None:
    rendezvous = start()
    deadline = time.monotonic() + FAILSAFE_SECONDS
    with connect(rendezvous) as client:
        run_handshake(client, JOB, Identity(0, 1), LinkKind.RENDEZVOUS, Role.CONNECTS, deadline)
        with suppress(OSError):
            client.sendall(garbage)
        assert rendezvous.works()


def test_a_message_that_is_too_long_is_not_read(start: Callable[..., Rendezvous]) -> None:
    rendezvous = start()
    deadline = time.monotonic() + FAILSAFE_SECONDS
    with connect(rendezvous) as client:
        run_handshake(client, JOB, Identity(0, 1), LinkKind.RENDEZVOUS, Role.CONNECTS, deadline)
        client.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(EOFError):
            receive_frame(client, deadline, 10)
    assert "message of 4294967295 bytes" in rendezvous.wait_for("refused")[0].text
    assert rendezvous.works()


def test_silent_and_slow_strangers_do_not_hold_up_the_ranks(start: Callable[..., Rendezvous]) -> None:
    rendezvous = start()
    crowd = [connect(rendezvous) for _ in range(200)]
    for stranger in crowd:
        with suppress(OSError):
            stranger.send(b"sirtaki")
    assert rendezvous.works()
    assert "too many unauthenticated connections" in rendezvous.wait_for("refused")[0].text
    for stranger in crowd:
        stranger.close()


def test_who_never_proves_himself_is_turned_away(
    start: Callable[..., Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirtaki.bindings.bootstrap.connection.unauthenticated.HANDSHAKE_SECONDS", 0.1)
    rendezvous = start()
    with connect(rendezvous) as stranger:
        stranger.settimeout(FAILSAFE_SECONDS)
        while stranger.recv(1000):
            pass
    assert "did not authenticate in time" in rendezvous.wait_for("refused")[0].text


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
