"""Unauthenticated peers that can reach a port of a job: rejected, reported, and no burden to the ranks."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from collected_hosts import CollectedHosts
from handshakes import run_handshake
from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.connection import unauthenticated
from sirtaki.bindings.bootstrap.connection.address import listen_at, require_key, split_address
from sirtaki.bindings.bootstrap.connection.handshake import HandshakeConnection, handshake_steps
from sirtaki.bindings.bootstrap.connection.unauthenticated import RejectionLog
from sirtaki.bindings.bootstrap.job import HandshakeError, Identity, Job, LinkKind, RendezvousError, Role
from sirtaki.bindings.bootstrap.peer_listener import PeerListener

JOB = Job("job", 2, b"k" * 32, "1.0")
NO_KEY = replace(JOB, key=b"")
HELLO_BYTES = len(next(handshake_steps(JOB, Identity(0), LinkKind.RENDEZVOUS, Role.CONNECTS))[0])
ROLE = struct.Struct("!8sHB").size - 1  # its offset in the hello


def rejections(job: CollectedHosts) -> list[str]:
    """Returns the reports about others, of which there is one at least."""
    return [event.text for event in job.wait_for("refused")]


@pytest.fixture
def job() -> Iterator[CollectedHosts]:
    with closing(CollectedHosts(job=JOB)) as one:
        yield one


def read_to_the_end(connection: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionError):
        while part := connection.recv(4096):
            data += part
    return data


def hello_of(job: Job, rank: int = 1, kind: LinkKind = LinkKind.RENDEZVOUS) -> bytes:
    return next(handshake_steps(job, Identity(rank, 1), kind, Role.CONNECTS))[0]


def test_a_recorded_handshake_opens_nothing(job: CollectedHosts) -> None:
    """The accepting side's nonce is new each time, and the proof covers it."""
    recorded = bytearray()
    with job.visit() as line:
        steps = handshake_steps(JOB, Identity(1, 1), LinkKind.RENDEZVOUS, Role.CONNECTS)
        outgoing, wanted = next(steps)
        with suppress(StopIteration):
            while True:
                line.sendall(outgoing)
                recorded += outgoing
                answer = b""
                while len(answer) < wanted:
                    answer += line.recv(wanted - len(answer))
                outgoing, wanted = steps.send(answer)
    assert len(recorded) == HELLO_BYTES + 32
    with job.visit() as thief:
        thief.sendall(recorded)
        assert len(read_to_the_end(thief)) == HELLO_BYTES  # no proof came back
    assert "a process that claims to be rank 1 does not know the key" in rejections(job)[0]
    assert job.works()


@pytest.mark.parametrize("turned", [False, True])
def test_who_gives_back_what_he_heard_learns_nothing(job: CollectedHosts, turned: bool) -> None:
    """The server sends no proof after its own hello, nor after that hello in the other role."""
    with job.visit() as mirror:
        hello = bytearray()
        while len(hello) < HELLO_BYTES:
            hello += mirror.recv(HELLO_BYTES - len(hello))
        if turned:
            hello[ROLE] = Role.CONNECTS
        mirror.sendall(hello + bytes(32))
        assert read_to_the_end(mirror) == b""
    words = "does not know the key" if turned else "another kind of connection"
    assert words in rejections(job)[0]
    assert job.works()


def test_a_proof_for_one_connection_does_not_fit_another(job: CollectedHosts) -> None:
    """A rank's proof to an impostor on one connection is useless on the impostor's own connection."""
    ours, impostor = socket.socketpair()
    deadline = time.monotonic() + FAILSAFE_SECONDS

    def be_fooled() -> Exception | None:
        try:
            run_handshake(ours, JOB, Identity(1, 1), LinkKind.RENDEZVOUS, Role.CONNECTS, deadline)
        except RendezvousError as error:
            return error
        return None

    with ThreadPoolExecutor(1) as pool, job.visit() as line, ours, impostor:
        fooled = pool.submit(be_fooled)
        theirs = impostor.recv(HELLO_BYTES, socket.MSG_WAITALL)
        impostor.sendall(
            hello_of(replace(JOB, key=b"x" * 32))[:ROLE] + bytes([Role.ACCEPTS]) + theirs[ROLE + 1 :]
        )
        proof = impostor.recv(32, socket.MSG_WAITALL)
        line.sendall(theirs + proof)  # sent to the real server, whose nonce that proof does not cover
        assert len(read_to_the_end(line)) == HELLO_BYTES
        impostor.close()
        assert isinstance(fooled.result(FAILSAFE_SECONDS), HandshakeError)
    assert "does not know the key" in rejections(job)[0]
    assert job.works()


def test_a_proof_that_is_given_back_is_refused() -> None:
    """An acceptor without the key can return the connecting rank's own proof, which is for the other role."""
    ours, impostor = socket.socketpair()
    deadline = time.monotonic() + FAILSAFE_SECONDS

    def reflect() -> None:
        theirs = impostor.recv(HELLO_BYTES, socket.MSG_WAITALL)
        hello = bytearray(hello_of(JOB))
        hello[ROLE] = Role.ACCEPTS
        impostor.sendall(hello)
        assert len(theirs) == HELLO_BYTES
        impostor.sendall(impostor.recv(32, socket.MSG_WAITALL))

    with ThreadPoolExecutor(1) as pool, ours, impostor:
        reflected = pool.submit(reflect)
        with pytest.raises(HandshakeError, match="does not know the key of this job"):
            run_handshake(ours, JOB, Identity(1, 1), LinkKind.RENDEZVOUS, Role.CONNECTS, deadline)
        reflected.result(FAILSAFE_SECONDS)


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (hello_of(replace(JOB, key=b"x" * 32)) + bytes(32), "does not know the key"),
        (hello_of(replace(JOB, id="other")) + bytes(32), "another job"),
        (hello_of(JOB, kind=LinkKind.PEERS) + bytes(32), "another kind of connection"),
        (b"sirtaki\0\xff\xff" + bytes(HELLO_BYTES), "version 65535 of sirtaki's protocol"),
        (b"\x80\x04\x95" + bytes(HELLO_BYTES), "not a process of sirtaki"),  # the start of a pickle
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(HELLO_BYTES), "not a process of sirtaki"),
    ],
    ids=["key", "job", "kind", "protocol", "pickle", "http"],
)
def test_who_is_no_rank_is_told_of_with_his_address(job: CollectedHosts, hello: bytes, words: str) -> None:
    with job.visit() as stranger:
        origin = f"(it came from 127.0.0.1 port {stranger.getsockname()[1]})"
        stranger.sendall(hello)
        assert len(read_to_the_end(stranger)) <= HELLO_BYTES
    refusal = rejections(job)[0]
    assert words in refusal
    assert refusal.endswith(origin)
    assert job.works()


def test_half_a_hello_and_then_silence(job: CollectedHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sirtaki.bindings.bootstrap.connection.unauthenticated.HANDSHAKE_SECONDS", 0.2)
    with job.visit() as slow:
        slow.sendall(hello_of(JOB)[:40])
        assert job.works()
        read_to_the_end(slow)
    assert "did not authenticate in time" in rejections(job)[0]


def test_a_crowd_is_told_of_in_a_few_lines(job: CollectedHosts) -> None:
    with ExitStack() as crowd:
        for _ in range(3 * unauthenticated.LIMIT):
            crowd.enter_context(job.visit())
        assert job.works()
    assert 1 <= len(rejections(job)) <= unauthenticated._BURST_LINES + 1


def test_what_was_not_told_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    rejections = RejectionLog(said.append)
    for _ in range(100):
        rejections.add("again")
    assert said == ["again"] * unauthenticated._BURST_LINES
    monkeypatch.setattr(unauthenticated, "_SECONDS_PER_LINE", 0.0)
    rejections._next = 0.0
    rejections.add("again")
    assert said[-1] == f"again (and {100 - unauthenticated._BURST_LINES} more since the last time)"


class _Visitor:
    """The part of a visitor that UnauthenticatedConnections uses."""

    def __init__(self, source: str) -> None:
        self.source = source


def _crowd() -> tuple[unauthenticated.UnauthenticatedConnections[_Visitor], list[_Visitor]]:  # type: ignore[type-var]
    """Returns connections in progress, and the list of those that are sent away."""
    sent_away: list[_Visitor] = []

    def reject(visitor: _Visitor, reason: str) -> None:
        sent_away.append(visitor)
        crowd.discard(visitor)

    crowd: unauthenticated.UnauthenticatedConnections[_Visitor] = unauthenticated.UnauthenticatedConnections(
        reject
    )  # type: ignore[type-var]
    return crowd, sent_away


def test_a_crowd_from_one_place_displaces_only_itself() -> None:
    crowd, sent_away = _crowd()
    honest = [_Visitor("10.0.0.2"), _Visitor("10.0.0.3")]
    for visitor in honest:
        crowd.add(visitor)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        for _ in range(3 * unauthenticated.LIMIT):
            with socket.create_connection(listening.getsockname()), crowd.accept(listening) as _:  # type: ignore[union-attr]
                crowd.add(_Visitor("10.6.6.6"))
    assert len(list(crowd)) <= unauthenticated.LIMIT
    assert len(sent_away) == 3 * unauthenticated.LIMIT + len(honest) - len(list(crowd))
    assert all(visitor in crowd for visitor in honest)


def test_ranks_of_this_machine_may_come_all_at_once(tmp_path: Path) -> None:
    """Has more ranks connect over a Unix socket than others may over TCP, which displace none of them."""
    crowd, sent_away = _crowd()
    count = 2 * unauthenticated.LIMIT
    ranks = [_Visitor("this machine") for _ in range(count)]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen(1)
        for rank in ranks:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(listening.getsockname())
                with crowd.accept(listening) as _:  # type: ignore[union-attr]
                    crowd.add(rank)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        for _ in range(count):
            with socket.create_connection(listening.getsockname()), crowd.accept(listening) as _:  # type: ignore[union-attr]
                crowd.add(_Visitor("10.6.6.6"))
    assert all(rank in crowd for rank in ranks)
    assert len(sent_away) == count - unauthenticated.LIMIT


class _Connection:
    """The part of a TCP connection from a given address that HandshakeConnection uses."""

    family = socket.AF_INET6

    def __init__(self, address: str) -> None:
        self._address = address

    def setsockopt(self, *option: int) -> None:
        assert option == (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def setblocking(self, blocking: bool) -> None:
        assert not blocking

    def getpeername(self) -> tuple[str, int, int, int]:
        return (self._address, 40000, 0, 0)


def test_all_addresses_of_an_ipv6_network_count_as_one_source() -> None:
    """A host may use any address of its /64: counted separately, these would allow it to displace ranks."""

    def source(address: str) -> str:
        steps = handshake_steps(JOB, Identity(0), LinkKind.RENDEZVOUS, Role.ACCEPTS)
        connection: socket.socket = _Connection(address)  # type: ignore[assignment]
        return HandshakeConnection(connection, steps, 0.0).source

    assert source("2001:db8:0:7::1") == source("2001:db8:0:7:ffff:ffff:ffff:ffff")
    assert source("2001:db8:0:7::1") != source("2001:db8:0:8::1")
    assert source("::ffff:192.0.2.7") == "192.0.2.7" != source("192.0.2.8")


def test_more_strangers_than_this_process_may_have_files() -> None:
    """The ranks are still accepted, although one of them shares the process with the rendezvous."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = [os.dup(0) for _ in range(300)]  # like a program that has opened data sets
    visits = (
        "import resource, socket, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "crowd = [socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) for _ in range(200)]\n"
        "print('here', flush=True)\n"
        "sys.stdin.read()\n"
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
    try:
        job = CollectedHosts(job=JOB)
        host, port = split_address(job.address(0))
        crowd = subprocess.Popen(
            [sys.executable, "-c", visits, host, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == b"here\n"
            assert job.works()
        finally:
            crowd.communicate(b"", FAILSAFE_SECONDS)
        assert "too many unauthenticated connections" in rejections(job)[0]
        job.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in many:
            os.close(descriptor)


def test_where_no_file_is_left_somebody_has_to_go() -> None:
    class Full:
        """A listening socket of a process that has no descriptors left."""

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many open files")

    gone: list[str] = []
    crowd: unauthenticated.UnauthenticatedConnections[_Visitor] = unauthenticated.UnauthenticatedConnections(
        lambda visitor, reason: gone.append(reason)
    )  # type: ignore[type-var]
    listening: socket.socket = Full()  # type: ignore[assignment]
    assert crowd.accept(listening) is None
    crowd.add(_Visitor("10.0.0.2"))
    assert crowd.accept(listening) is None
    assert gone == ["this process has too many files open"]


def test_without_a_key_nothing_leaves_this_machine() -> None:
    with pytest.raises(RendezvousError, match="the ranks need a common key"):
        listen_at("0.0.0.0:0", b"")
    with PeerListener() as reception, pytest.raises(RendezvousError, match="need a common key"):
        reception.listen_to_hosts([], NO_KEY)

    class Elsewhere:
        """A connection to another machine."""

        family = socket.AF_INET6

        def getpeername(self) -> tuple[str, int, int, int]:
            return ("::ffff:192.0.2.7", 29500, 0, 0)

    class Here(Elsewhere):
        def getpeername(self) -> tuple[str, int, int, int]:
            return ("::ffff:127.0.0.1", 29500, 0, 0)

    elsewhere: Callable[[], socket.socket] = Elsewhere  # type: ignore[assignment]
    here: Callable[[], socket.socket] = Here  # type: ignore[assignment]
    with pytest.raises(
        RendezvousError, match=r"192\.0\.2\.7 is another machine, so the ranks need a common key"
    ):
        require_key(elsewhere(), NO_KEY)
    require_key(elsewhere(), JOB)
    require_key(here(), NO_KEY)
