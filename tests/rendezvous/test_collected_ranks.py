"""The server's side of a host's collector, whose bytes the tests write and read themselves."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from collected_hosts import CollectedHosts, Start
from handshakes import run_handshake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import deadline, wait_until

from sirtaki.bindings.bootstrap.connection.wire import pack_frame, receive_frame
from sirtaki.bindings.bootstrap.job import CALLS, COLLECTOR_RANK, Identity, Job, LinkKind, Role
from sirtaki.bindings.bootstrap.messages import (
    ARRIVED,
    CALL_LIMIT,
    COLLECTED_LIMIT,
    CONFIRM,
    COUNT,
    JOIN,
    LEFT,
    MESSAGE,
    NUMBER,
    PASSED,
    REQUEST_LIMIT,
    RESUME,
    RankEvent,
    Route,
    pack_arrival,
    pack_collector_join,
    pack_delivery,
    pack_failure,
    pack_payloads,
    pack_report,
    pack_resumption,
    pack_welcome,
    unpack_delivery,
    unpack_welcome,
)

JOB = Job("job", 3, b"k" * 32, "1.0")
TOKEN = b"a" * 16
FIRST = pack_collector_join(JOB.size, TOKEN)  # a collector's first message
LIMIT = 10_000_000


class Collector:
    """A connection that is a collector for the server."""

    def __init__(self, hosts: CollectedHosts) -> None:
        self.line = hosts.visit()
        mine = Identity(COLLECTOR_RANK)
        run_handshake(self.line, JOB, mine, LinkKind.RENDEZVOUS, Role.CONNECTS, deadline())

    def join(self, token: bytes = b"") -> Collector:
        self.send(pack_collector_join(JOB.size, token or os.urandom(16)))
        assert self.next()[:1] == b"W"
        return self

    def send(self, *messages: bytes) -> None:
        self.line.sendall(b"".join(map(pack_frame, messages)))

    def next(self) -> bytes:
        return receive_frame(self.line, deadline(), LIMIT)

    def arrive(self, number: int, rank: int, generation: int = 1) -> None:
        """Sends what a rank sends that enters an init()."""
        self.send(
            pack_arrival(number, Identity(rank, generation)),
            passed(number, JOIN + NUMBER.pack(JOB.size)),
            passed(number, gather(0, b"payload of %d" % rank)),
        )


def passed(number: int, message: bytes) -> bytes:
    return PASSED + NUMBER.pack(number) + message


def gather(number: int, payload: bytes) -> bytes:
    return b"G" + NUMBER.pack(number) + payload


@pytest.fixture
def hosts(start: Start) -> CollectedHosts:
    """Returns a server whose collectors are the tests'."""
    return start(job=JOB, accepts_collectors=True)


@pytest.fixture
def collect(hosts: CollectedHosts) -> Iterator[Callable[[], Collector]]:
    with ExitStack() as opened:

        def connect() -> Collector:
            collector = Collector(hosts)
            opened.callback(collector.line.close)
            return collector

        yield connect


def test_an_answer_goes_once_to_each_host(collect: Callable[[], Collector]) -> None:
    first, second = collect().join(), collect().join()
    first.arrive(7, 0)
    first.arrive(9, 2)
    second.arrive(0, 1)
    answer = pack_payloads(tuple(b"payload of %d" % rank for rank in range(3)))
    assert first.next() == b"<" + struct.pack("!III", 2, 7, 9) + answer
    assert second.next() == b"<" + struct.pack("!II", 1, 0) + answer
    first.line.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        first.line.recv(1)


def test_a_failure_goes_once_to_each_host(collect: Callable[[], Collector]) -> None:
    first, second = collect().join(), collect().join()
    first.arrive(0, 0)
    first.arrive(1, 2)
    second.arrive(0, 1)
    first.next()
    second.next()
    first.send(LEFT + NUMBER.pack(1))
    text = b"rank 2 has gone (its process ended, or its init failed)"
    assert first.next() == b"<" + struct.pack("!II", 1, 0) + b"F" + NUMBER.pack(2) + text
    assert second.next() == b"<" + struct.pack("!II", 1, 0) + b"F" + NUMBER.pack(2) + text


def test_a_rank_that_is_refused_is_closed_alone(
    collect: Callable[[], Collector], hosts: CollectedHosts
) -> None:
    collector = collect().join()
    collector.arrive(0, 0)
    collector.arrive(1, 3)
    refusal = b"there is no rank 3 in a job of 3 ranks: they are 0 to 2"
    assert collector.next() == b"<" + struct.pack("!II", 1, 1) + b"X" + refusal
    assert collector.next() == b"-" + NUMBER.pack(1)
    collector.send(LEFT + NUMBER.pack(1))  # which was on its way
    collector.arrive(2, 1)
    collector.arrive(3, 2)
    assert collector.next()[:17] == b"<" + struct.pack("!IIII", 3, 0, 2, 3)
    assert [event for event in hosts.events if event.kind == "refused"] == [
        RankEvent("refused", 3, 1, refusal.decode())
    ]
    assert hosts.works()


@pytest.mark.parametrize(
    "messages",
    [
        [pack_collector_join(4, TOKEN)],
        [JOIN + NUMBER.pack(3)],  # without a token
        [RESUME],
        [pack_arrival(0, Identity(0, 1))],  # before it has joined
        [FIRST, FIRST],
        [FIRST, CONFIRM],
        [FIRST, pack_arrival(0, Identity(0, 1)), pack_arrival(0, Identity(1, 1))],
        [FIRST, ARRIVED + NUMBER.pack(0) + b"short"],
        [FIRST, b"?" + NUMBER.pack(0)],
        [FIRST, b">\0"],
    ],
)
def test_a_collector_that_does_not_follow_the_protocol_is_refused(
    collect: Callable[[], Collector],
    hosts: CollectedHosts,
    messages: list[bytes],
) -> None:
    collector = collect()
    collector.send(*messages)
    answers = []
    with suppress(EOFError):
        while True:
            answers.append(collector.next())
    assert answers[-1] == b"Xthe rendezvous does not understand this message"
    assert [answer[:1] for answer in answers[:-1]] == [b"W"] * (len(messages) > 1)
    assert [event.rank for event in hosts.events if event.kind == "refused"] == [-1]
    assert hosts.works()


@pytest.mark.parametrize(
    ("channel", "size", "text"),
    [
        (0, REQUEST_LIMIT + 1, "rank 1 sent a message of 65601 bytes: too many"),
        (CALLS, CALL_LIMIT + 1, "rank 1 sent a message of 1048641 bytes: too many"),
    ],
)
def test_messages_behind_a_collector_are_limited_like_those_of_other_ranks(
    collect: Callable[[], Collector], hosts: CollectedHosts, channel: int, size: int, text: str
) -> None:
    collector = collect().join()
    collector.send(
        pack_arrival(0, Identity(1, 1, channel)),
        passed(0, JOIN + NUMBER.pack(JOB.size)),
        passed(0, MESSAGE + bytes(size - 1)),
    )
    assert collector.next() == b"X" + text.encode()
    assert hosts.works()


def test_the_connections_behind_a_collector_are_limited(
    collect: Callable[[], Collector], hosts: CollectedHosts
) -> None:
    collector = collect().join()
    collector.send(*(pack_arrival(number, Identity(0, number)) for number in range(4 * JOB.size + 1)))
    assert collector.next() == b"Xmore than 12 processes of a host have connected"
    assert hosts.works()


def test_a_collector_is_refused_where_ranks_connect_directly(start: Start) -> None:
    hosts = start(job=JOB)
    collector = Collector(hosts)
    with collector.line:
        collector.send(FIRST)
        refusal = b"the agent of a host connected, but ranks connect to this rendezvous directly"
        assert collector.next() == b"X" + refusal
    assert hosts.works()


def test_a_message_that_is_too_long_is_not_read(
    collect: Callable[[], Collector], hosts: CollectedHosts
) -> None:
    collector = collect().join()
    with suppress(OSError):
        collector.line.sendall(NUMBER.pack(COLLECTED_LIMIT + 1))
        assert collector.line.recv(1) == b""
    assert hosts.works()


@given(garbage=st.one_of(st.binary(min_size=1, max_size=300), st.binary(max_size=80).map(pack_frame)))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_from_a_collector_ends_only_its_ranks(
    collect: Callable[[], Collector], hosts: CollectedHosts, garbage: bytes
) -> None:
    collector = collect().join()
    with suppress(OSError):
        collector.line.sendall(garbage)
    assert hosts.works()
    collector.line.close()


def test_a_welcome_of_a_collector_has_its_route() -> None:
    session = b"0123456789abcdef"
    for route in (Route(True, ["10.0.0.1", "fd00::1"]), Route(False, [])):
        assert unpack_welcome(pack_welcome(session, route)[1:]) == (session, route)
    assert unpack_welcome(pack_welcome(session)[1:]) == (session, None)


@given(numbers=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9), message=st.binary(min_size=1))
def test_a_delivery_survives_the_wire(numbers: list[int], message: bytes) -> None:
    found, delivered = unpack_delivery((pack_delivery(numbers) + message)[1:])
    assert (list(found), delivered) == (numbers, message)


def test_a_collector_continues_on_another_connection(
    collect: Callable[[], Collector], hosts: CollectedHosts
) -> None:
    """The server still takes the first connection as open. The answer on it has been lost."""
    first, other = collect().join(TOKEN), collect().join()
    first.arrive(7, 0)
    first.arrive(9, 2)
    other.arrive(0, 1)
    answer = (
        b"<" + struct.pack("!III", 2, 7, 9) + pack_payloads(tuple(b"payload of %d" % r for r in range(3)))
    )
    assert first.next() == answer
    second = collect()
    second.send(pack_resumption(TOKEN, 0), passed(7, pack_report("finished", "")))
    assert second.next() == b"~" + COUNT.pack(6)  # the messages of two ranks that arrive
    assert second.next() == answer
    with pytest.raises(EOFError):
        first.next()
    wait_until(lambda: any(event.kind == "finished" for event in hosts.events), "the report has come")
    third = collect()
    third.send(pack_resumption(TOKEN, 1))
    assert third.next() == b"~" + COUNT.pack(7)
    third.send(LEFT + NUMBER.pack(9))
    other.next()
    assert other.next() == b"<" + struct.pack("!II", 1, 0) + pack_failure(
        2, "rank 2 has gone (its process ended, or its init failed)"
    )
    assert [event for event in hosts.events if event.kind != "arrived"] == [RankEvent("finished", 0, 1)]
    assert hosts.works()


def test_a_collector_that_says_goodbye_has_ended(collect: Callable[[], Collector]) -> None:
    first, other = collect().join(TOKEN), collect().join()
    first.arrive(7, 0)
    first.arrive(9, 2)
    other.arrive(0, 1)
    other.next()
    first.send(b".")
    text = "rank 0 has gone (the connection to the agent of its host ended)"
    assert other.next() == b"<" + struct.pack("!II", 1, 0) + pack_failure(0, text)
    second = collect()
    second.send(pack_resumption(TOKEN, 0))
    refusal = b"its connection was interrupted for too long, or belonged to another rendezvous"
    assert second.next() == b"X" + refusal


@pytest.mark.parametrize("received", [4, 2**64 - 1])
def test_a_collector_cannot_have_received_more_than_was_sent(
    collect: Callable[[], Collector], hosts: CollectedHosts, received: int
) -> None:
    collect().join(TOKEN)
    second = collect()
    second.send(pack_resumption(TOKEN, received))
    assert second.next() == b"Xthe other side has confirmed messages that were not sent"
    assert hosts.works()
