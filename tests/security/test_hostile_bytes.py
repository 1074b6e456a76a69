"""Arbitrary bytes from strangers and ranks: a clear error; no other exception, no endless wait."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from collected_hosts import CollectedHosts
from handshakes import run_handshake
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.connection.handshake import handshake_steps
from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, take_frame
from sirtaki.bindings.bootstrap.job import HandshakeError, Identity, Job, LinkKind, RendezvousError, Role
from sirtaki.bindings.bootstrap.messages import PAYLOAD_LIMIT, REPORTS, pack_payloads, unpack_payloads
from sirtaki.bindings.bootstrap.server.rendezvous_state import Answer, RendezvousState
from sirtaki.bindings.bootstrap.world_builder import (
    Offer,
    RankDescription,
    disagreement,
    pack,
    topology_of,
    unpack,
    unpack_offer,
    unpack_settings,
)

JOB = Job("job", 2, b"k" * 32, "1.0")
TRUE_MEMBER = RankDescription("boot/1", "hostA", 70, "unix:@sirtaki-70", 64 * "a")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def almost(true: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Returns the true values with some of them replaced."""
    changed = st.fixed_dictionaries({}, optional=dict.fromkeys(true, json_values))
    return changed.map(lambda lies: json.dumps({**true, **lies}).encode())


@given(payload=st.binary(max_size=300) | almost(json.loads(pack(TRUE_MEMBER))))
@example(payload=b"[" * PAYLOAD_LIMIT)
@example(payload=pack(TRUE_MEMBER).replace(b"70,", b"1e999,"))
@example(payload=pack(TRUE_MEMBER).replace(b"70,", b"9" * 5000 + b","))
@example(payload=pack(TRUE_MEMBER).replace(b"unix:@sirtaki-70", b"unix:@\\ud800"))
@settings(deadline=None)
def test_what_a_rank_says_of_itself(payload: bytes) -> None:
    try:
        member = unpack(payload)
    except RendezvousError:
        return
    assert member.hostname.isprintable()
    assert len(member.hostname) <= 200
    assert len(member.settings) == 64
    member.listens_at.encode()
    peer = topology_of(0, [TRUE_MEMBER, member]).peers[1]
    assert 0 < peer.pid < 1 << 31


@given(payload=st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
@example(payload=b"[" * PAYLOAD_LIMIT)
@example(payload=b'{"fusion\\ud800": "1\\n2"}')
@settings(deadline=None)
def test_what_a_rank_says_of_its_settings(payload: bytes) -> None:
    with suppress(RendezvousError):
        theirs = unpack_settings(payload)
        assert all(text.isprintable() and len(text) <= 200 for text in [*theirs, *theirs.values()])
        assert str(disagreement([{"fusion": "64"}, theirs])).isprintable()


@given(payload=st.binary(max_size=300) | almost({"addresses": ["10.0.0.2:80"], "no_memory": ""}))
@example(payload=pack(Offer(["10.0.0.2:80"] * 10_000, "")))
@example(payload=pack(Offer(["evil.example:80"], "")))
@settings(deadline=None)
def test_what_a_rank_offers(payload: bytes) -> None:
    with suppress(RendezvousError):
        offer = unpack_offer(payload)
        assert len(offer.addresses) <= 64
        assert offer.no_memory.isprintable()


@given(body=st.binary(max_size=100), count=st.integers(0, 5))
@example(body=b"\xff\xff\xff\xff", count=1)
@example(body=b"\0\0\0\1", count=1)
@example(body=b"", count=1)
@example(body=b"\0\1\0\1" + bytes(PAYLOAD_LIMIT + 1), count=1)
def test_what_the_rendezvous_answers(body: bytes, count: int) -> None:
    with suppress(RendezvousError):
        payloads = unpack_payloads(Frame(MessageKind.GATHERED, payload=body), count)
        assert max(map(len, payloads), default=0) <= PAYLOAD_LIMIT
        assert pack_payloads(payloads).payload == body


@given(payloads=st.lists(st.binary(max_size=50), max_size=5))
def test_payloads_survive_the_wire(payloads: list[bytes]) -> None:
    packed = bytearray(pack_payloads(payloads).pack(len(payloads)))
    gathered = take_frame(packed, (MessageKind.GATHERED,), len(payloads))
    assert gathered is not None
    assert unpack_payloads(gathered, len(payloads)) == payloads


@given(
    hello=st.binary(min_size=136, max_size=136)
    | st.just(next(handshake_steps(JOB, Identity(1), LinkKind.RENDEZVOUS, Role.ACCEPTS))[0]),
    proof=st.binary(min_size=32, max_size=32),
    role=st.sampled_from(Role),
)
def test_a_handshake_with_any_bytes(hello: bytes, proof: bytes, role: Role) -> None:
    steps = handshake_steps(JOB, Identity(0), LinkKind.RENDEZVOUS, role)
    _, wanted = next(steps)

    def go_on() -> None:
        steps.send(hello[:wanted].ljust(wanted, b"\0"))
        steps.send(proof)

    with pytest.raises(HandshakeError) as refused:
        go_on()
    assert str(refused.value).isprintable()


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2), st.sampled_from("gdx")),
        max_size=30,
    )
)
def test_rounds_answer_everybody_once(steps: list[tuple[int, int, int, str]]) -> None:
    """For any sequence of ranks' actions, each waiting rank gets an answer, at the latest at the deadline."""
    rounds = RendezvousState(3, timeout=5.0)
    waiting: set[tuple[int, int, int]] = set()
    now = 0.0

    def take(answers: list[Answer]) -> None:
        for answer in answers:
            for one in answer.waiting:
                waiting.remove((*answer.key, one))

    for generation, number, rank, what in steps:
        now += 1.0
        take(rounds.expire(now))
        if what == "d":
            take(rounds.note_departure(rank, generation, "has gone"))
        elif what == "g" and rounds.has_failed(generation):
            answers = rounds.contribute((generation, number), rank, b"x", now)
            assert [(answer.waiting, bool(answer.error)) for answer in answers] == [((rank,), True)]
        elif what == "g" and any((one[0], one[2]) == (generation, rank) for one in waiting):
            with pytest.raises(RendezvousError):  # it has not waited, or claims to be another process's rank
                rounds.contribute((generation, number), rank, b"x", now)
        elif what == "g":
            waiting.add((generation, number, rank))
            take(rounds.contribute((generation, number), rank, b"x", now))
    take(rounds.expire(now + 6.0))
    assert not waiting
    assert rounds.next_deadline() is None


@pytest.fixture(scope="module")
def hosts() -> Iterator[CollectedHosts]:
    with closing(CollectedHosts(job=JOB)) as one:
        yield one


messages = st.one_of(
    st.builds(lambda size: Frame(MessageKind.JOIN, number=size).pack(), st.integers(0, 3)),
    st.builds(
        lambda number, payload: Frame(MessageKind.GATHER, payload=payload, number=number).pack(),
        st.integers(0, 3) | st.just(2**64 - 1),
        st.binary(max_size=20),
    ),
    st.builds(
        lambda number, text: Frame.of(MessageKind.EVENT, text, number=number).pack(),
        st.integers(0, len(REPORTS)),
        st.sampled_from(["", "\x1b[2J"]),
    ),
    st.builds(
        lambda kind, number, payload: Frame(kind, payload=payload[: kind.limit], number=number).pack(),
        st.sampled_from(MessageKind),
        st.integers(0, 3),
        st.binary(max_size=20),
    ),
    st.binary(max_size=20),
)


@given(said=st.lists(messages, max_size=6), rank=st.integers(-2, 3), last=st.binary(max_size=8))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_rank_that_says_anything_in_any_order(
    hosts: CollectedHosts, said: list[bytes], rank: int, last: bytes
) -> None:
    """The rank is answered or rejected, and the honest ranks are served."""
    deadline = time.monotonic() + FAILSAFE_SECONDS
    mine = Identity(rank, next(hosts.generations))
    with hosts.visit() as connection:
        run_handshake(connection, JOB, mine, LinkKind.RENDEZVOUS, Role.CONNECTS, deadline)
        with suppress(OSError):
            for message in said:
                connection.sendall(message)
            connection.sendall(last)
        assert hosts.works()
