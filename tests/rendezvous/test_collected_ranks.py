"""The server's side of a host's collector, whose bytes the tests write and read themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from collected_hosts import GARBAGE, CollectedHosts, Start
from handshakes import run_handshake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import deadline, wait_until

from sirtaki.bindings.bootstrap.connection.wire import (
    TOKEN_BYTES,
    Frame,
    MessageKind,
    receive_frame,
    take_frame,
)
from sirtaki.bindings.bootstrap.job import (
    CALLS,
    COLLECTOR_RANK,
    Identity,
    Job,
    LinkKind,
    RendezvousError,
    Role,
)
from sirtaki.bindings.bootstrap.messages import (
    REPORTS,
    RankEvent,
    Route,
    pack_arrival,
    pack_delivery,
    pack_payloads,
    pack_welcome,
    unpack_delivery,
    unpack_welcome,
)

JOB = Job("job", 3, b"k" * 32, "1.0")
TOKEN = b"a" * TOKEN_BYTES
FIRST = Frame(MessageKind.JOIN_HOST, payload=TOKEN, number=JOB.size)  # a collector's first message


class Collector:
    """A connection that is a collector for the server."""

    def __init__(self, hosts: CollectedHosts) -> None:
        self.line = hosts.visit()
        mine = Identity(COLLECTOR_RANK)
        run_handshake(self.line, JOB, mine, LinkKind.RENDEZVOUS, Role.CONNECTS, deadline())

    def join(self, token: bytes = b"") -> Collector:
        self.send(Frame(MessageKind.JOIN_HOST, payload=token or os.urandom(16), number=JOB.size))
        assert self.next().kind == MessageKind.WELCOME
        return self

    def send(self, *frames: Frame) -> None:
        self.line.sendall(b"".join(frame.pack() for frame in frames))

    def next(self) -> Frame:
        return receive_frame(self.line, deadline(), MessageKind, JOB.size)

    def next_delivery(self) -> tuple[list[int], Frame]:
        """Returns the numbers of a DELIVER, and the frame for them."""
        numbers, packed = unpack_delivery(self.next())
        frame = take_frame(bytearray(packed), MessageKind, JOB.size)
        assert frame is not None
        return list(numbers), frame

    def arrive(self, number: int, rank: int, generation: int = 1) -> None:
        """Sends what a rank sends that enters an init()."""
        self.send(
            pack_arrival(number, Identity(rank, generation)),
            said(number, Frame(MessageKind.JOIN, number=JOB.size)),
            said(number, Frame(MessageKind.GATHER, payload=b"payload of %d" % rank)),
        )


def said(number: int, frame: Frame) -> Frame:
    return Frame(MessageKind.SAID, payload=frame.pack(), number=number)


def resumption(received: int) -> Frame:
    return Frame(MessageKind.RESUME, payload=TOKEN, number=received)


def resumed(received: int) -> Frame:
    return Frame(MessageKind.RESUMED, number=received)


def left(number: int) -> Frame:
    return Frame(MessageKind.LEFT, number=number)


def rejected(text: str) -> Frame:
    return Frame.of(MessageKind.REJECTED, text)


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
    answer = pack_payloads([b"payload of %d" % rank for rank in range(3)])
    assert first.next_delivery() == ([7, 9], answer)
    assert second.next_delivery() == ([0], answer)
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
    first.send(left(1))
    failure = Frame.of(MessageKind.FAILED, "rank 2 has gone (its process ended, or its init failed)", 2)
    assert first.next_delivery() == ([0], failure)
    assert second.next_delivery() == ([0], failure)


def test_a_rank_that_is_refused_is_closed_alone(
    collect: Callable[[], Collector], hosts: CollectedHosts
) -> None:
    collector = collect().join()
    collector.arrive(0, 0)
    collector.arrive(1, 3)
    refusal = "there is no rank 3 in a job of 3 ranks: they are 0 to 2"
    assert collector.next_delivery() == ([1], rejected(refusal))
    assert collector.next() == Frame(MessageKind.CLOSE, number=1)
    collector.send(left(1))  # which was on its way
    collector.arrive(2, 1)
    collector.arrive(3, 2)
    assert collector.next_delivery()[0] == [0, 2, 3]
    assert [event for event in hosts.events if event.kind == "refused"] == [
        RankEvent("refused", 3, 1, refusal)
    ]
    assert hosts.works()


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([replace(FIRST, number=4)], "JOIN_HOST is not expected now"),
        ([replace(FIRST, payload=TOKEN[1:])], "JOIN_HOST is not expected now"),
        ([Frame(MessageKind.JOIN, number=3)], "JOIN is not expected now"),
        ([pack_arrival(0, Identity(0, 1))], "ARRIVED is not expected now"),  # before it has joined
        ([FIRST, FIRST], "JOIN_HOST is not expected now"),
        ([FIRST, *2 * [pack_arrival(0, Identity(0, 1))]], "ARRIVED is not expected now"),
        ([FIRST, Frame(MessageKind.ARRIVED, payload=b"short")], "ARRIVED is malformed"),
        ([FIRST, Frame(MessageKind.DELIVER)], "DELIVER is not expected now"),
    ],
)
def test_a_collector_that_does_not_follow_the_protocol_is_refused(
    collect: Callable[[], Collector],
    hosts: CollectedHosts,
    frames: list[Frame],
    text: str,
) -> None:
    collector = collect()
    collector.send(*frames)
    answers = []
    with suppress(EOFError):
        while True:
            answers.append(collector.next())
    assert answers[-1] == rejected(text)
    assert [answer.kind for answer in answers[:-1]] == [MessageKind.WELCOME] * (len(frames) > 1)
    assert [event.rank for event in hosts.events if event.kind == "refused"] == [-1]
    assert hosts.works()


@pytest.mark.parametrize(
    ("channel", "kind", "payload", "text"),
    [
        (0, MessageKind.GATHER, bytes(65537), "GATHER has 65537 bytes where 65536 are allowed"),
        (0, MessageKind.PIECE, b"", "PIECE is not expected now"),
        (CALLS, MessageKind.GATHER, b"", "GATHER is not expected now"),
    ],
)
def test_messages_behind_a_collector_are_limited_like_those_of_other_ranks(
    collect: Callable[[], Collector],
    hosts: CollectedHosts,
    channel: int,
    kind: MessageKind,
    payload: bytes,
    text: str,
) -> None:
    collector = collect().join()
    header = Frame(kind).pack()[:-4] + len(payload).to_bytes(4, "big")
    collector.send(
        pack_arrival(0, Identity(1, 1, channel)),
        said(0, Frame(MessageKind.JOIN, number=JOB.size)),
        Frame(MessageKind.SAID, payload=header + payload),
    )
    assert collector.next_delivery() == ([0], rejected(text))
    assert collector.next() == Frame(MessageKind.CLOSE)
    assert hosts.works()


@pytest.mark.parametrize("payload", [b"", b"srt2", Frame(MessageKind.GATHER).pack() + b"more"])
def test_a_client_of_a_collector_sends_whole_frames(collect: Callable[[], Collector], payload: bytes) -> None:
    collector = collect().join()
    collector.send(
        pack_arrival(0, Identity(1, 1)),
        said(0, Frame(MessageKind.JOIN, number=JOB.size)),
        Frame(MessageKind.SAID, payload=payload),
    )
    assert collector.next_delivery() == ([0], rejected("SAID is malformed"))


def test_the_connections_behind_a_collector_are_limited(
    collect: Callable[[], Collector], hosts: CollectedHosts
) -> None:
    collector = collect().join()
    collector.send(*(pack_arrival(number, Identity(0, number)) for number in range(4 * JOB.size + 1)))
    assert collector.next() == rejected("more than 12 processes of a host have connected")
    assert hosts.works()


def test_a_collector_is_refused_where_ranks_connect_directly(start: Start) -> None:
    hosts = start(job=JOB)
    collector = Collector(hosts)
    with collector.line:
        collector.send(FIRST)
        refusal = "the agent of a host connected, but ranks connect to this rendezvous directly"
        assert collector.next() == rejected(refusal)
    assert hosts.works()


def test_a_message_that_is_too_long_is_not_read(
    collect: Callable[[], Collector], hosts: CollectedHosts
) -> None:
    collector = collect().join()
    collector.line.sendall(Frame(MessageKind.SAID).pack()[:-4] + b"\xff\xff\xff\xff")
    assert collector.next() == rejected("SAID has 4294967295 bytes where 1048597 are allowed")
    assert hosts.works()


@given(garbage=GARBAGE)
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
        assert unpack_welcome(pack_welcome(session, route)) == (session, route)
    assert unpack_welcome(pack_welcome(session)) == (session, None)


@given(numbers=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9), message=st.binary(min_size=1))
def test_a_delivery_survives_the_wire(numbers: list[int], message: bytes) -> None:
    packed = bytearray(pack_delivery(numbers, message, 9) + message)
    delivery = take_frame(packed, (MessageKind.DELIVER,), 9)
    assert delivery is not None
    found, delivered = unpack_delivery(delivery)
    assert (list(found), delivered, packed) == (numbers, message, b"")


@pytest.mark.parametrize("number", [0, 2, 2**62, 2**64 - 1])
def test_a_delivery_has_as_many_numbers_as_it_says(number: int) -> None:
    with pytest.raises(RendezvousError, match="DELIVER is malformed"):
        unpack_delivery(Frame(MessageKind.DELIVER, payload=bytes(8), number=number))


def test_a_collector_continues_on_another_connection(
    collect: Callable[[], Collector], hosts: CollectedHosts
) -> None:
    """The server still takes the first connection as open. The answer on it has been lost."""
    first, other = collect().join(TOKEN), collect().join()
    first.arrive(7, 0)
    first.arrive(9, 2)
    other.arrive(0, 1)
    answer = [7, 9], pack_payloads([b"payload of %d" % rank for rank in range(3)])
    assert first.next_delivery() == answer
    second = collect()
    second.send(resumption(0), said(7, Frame.of(MessageKind.EVENT, "", number=REPORTS.index("finished"))))
    assert second.next() == resumed(6)  # the messages of two ranks that arrive
    assert second.next_delivery() == answer
    with pytest.raises(EOFError):
        first.next()
    wait_until(lambda: any(event.kind == "finished" for event in hosts.events), "the report has come")
    third = collect()
    third.send(resumption(1))
    assert third.next() == resumed(7)
    third.send(left(9))
    other.next()
    failure = Frame.of(MessageKind.FAILED, "rank 2 has gone (its process ended, or its init failed)", 2)
    assert other.next_delivery() == ([0], failure)
    assert [event for event in hosts.events if event.kind != "arrived"] == [RankEvent("finished", 0, 1)]
    assert hosts.works()


def test_a_collector_that_says_goodbye_has_ended(collect: Callable[[], Collector]) -> None:
    first, other = collect().join(TOKEN), collect().join()
    first.arrive(7, 0)
    first.arrive(9, 2)
    other.arrive(0, 1)
    other.next()
    first.send(Frame(MessageKind.GOODBYE))
    text = "rank 0 has gone (the connection to the agent of its host ended)"
    assert other.next_delivery() == ([0], Frame.of(MessageKind.FAILED, text, 0))
    second = collect()
    second.send(resumption(0))
    refusal = "its connection was interrupted for too long, or belonged to another rendezvous"
    assert second.next() == rejected(refusal)


@pytest.mark.parametrize("received", [4, 2**64 - 1])
def test_a_collector_cannot_have_received_more_than_was_sent(
    collect: Callable[[], Collector], hosts: CollectedHosts, received: int
) -> None:
    collect().join(TOKEN)
    second = collect()
    second.send(resumption(received))
    assert second.next() == rejected("the other side has confirmed messages that were not sent")
    assert hosts.works()
