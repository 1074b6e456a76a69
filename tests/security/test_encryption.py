"""An attacker between two hosts of a job that encrypts its connections can see and do nothing."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from launching import FAILSAFE_SECONDS
from world import encrypt

from sirtaki.bindings.bootstrap.connection import encryption
from sirtaki.bindings.bootstrap.connection.address import split_address
from sirtaki.bindings.bootstrap.connection.connect import connect
from sirtaki.bindings.bootstrap.connection.encryption import Certificate, Connection, TlsConnection
from sirtaki.bindings.bootstrap.connection.handshake import handshake_steps
from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, receive_frame, send_frame
from sirtaki.bindings.bootstrap.job import HandshakeError, Identity, Job, LinkKind, RendezvousError, Role
from sirtaki.bindings.bootstrap.messages import RankEvent
from sirtaki.bindings.bootstrap.peer_listener import Handshakes, LinkKey, PeerListener
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.bindings.bootstrap.world_builder import choose

JOB = Job("job", 2, b"k" * 32, "1.0", encrypt=True)
PLAIN = replace(JOB, encrypt=False)
SECRET = b"what nobody else may read " * 100
HELLO_BYTES = len(next(handshake_steps(JOB, Identity(0), LinkKind.RENDEZVOUS, Role.CONNECTS))[0])
PROOF_BYTES = 32
CERTIFICATE = slice(HELLO_BYTES - 64, HELLO_BYTES - 32)  # its fingerprint, in a hello


class Between:
    """An attacker: a rank connects to it instead of to `target`, and it connects there itself."""

    def __init__(self, target: str, meet: Callable[[Between, socket.socket, socket.socket], None]) -> None:
        self.seen = bytearray()
        self._target = split_address(target)
        self._meet = meet
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target, FAILSAFE_SECONDS)
                near.settimeout(FAILSAFE_SECONDS)
                threading.Thread(target=self._run, args=(near, far), daemon=True).start()

    def _run(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, contextlib.suppress(OSError, RendezvousError):
            self._meet(self, near, far)

    def close(self) -> None:
        self._listening.close()


def record(between: Between, near: socket.socket, far: socket.socket) -> None:
    """Passes all bytes on, and records them."""

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                between.seen += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    back = threading.Thread(target=carry, args=(far, near))
    back.start()
    carry(near, far)
    back.join()


def terminate_tls(between: Between, near: socket.socket, far: socket.socket) -> None:
    """Passes the proofs on, and then speaks TLS with both sides, with a certificate of its own."""

    def pass_on(source: socket.socket, target: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += source.recv(count - len(data)) or b"\0" * count
        target.sendall(data)
        return data

    hello_of_far = pass_on(far, near, HELLO_BYTES)
    hello_of_near = pass_on(near, far, HELLO_BYTES)
    pass_on(near, far, PROOF_BYTES)
    pass_on(far, near, PROOF_BYTES)
    own = Certificate()
    sides = [
        TlsConnection(near, own, hello_of_near[CERTIFICATE], accepts=True),
        TlsConnection(far, own, hello_of_far[CERTIFICATE], accepts=False),
    ]
    deadline = time.monotonic() + FAILSAFE_SECONDS
    while sides and time.monotonic() < deadline:
        for side in list(sides):
            try:
                side.run_handshake()
            except (OSError, HandshakeError):
                sides.remove(side)
        time.sleep(0.005)


@contextlib.contextmanager
def rendezvous(job: Job, events: list[RankEvent]) -> Iterator[RendezvousServer]:
    with RendezvousServer("127.0.0.1:0", job, FAILSAFE_SECONDS, events.append) as server:
        yield server


def gather_through(job: Job, address: str) -> list[list[bytes]]:
    def take_part(rank: int) -> list[bytes]:
        client = RendezvousClient.connect(address, job, Identity(rank, 1), FAILSAFE_SECONDS)
        with contextlib.closing(client):
            client.all_gather(b"x" * 65536)
            return client.all_gather(SECRET)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(take_part, range(2)))


@pytest.mark.parametrize("job", [PLAIN, JOB], ids=["plain", "encrypted"])
def test_what_a_rendezvous_passes_on_is_seen_only_without_encryption(job: Job) -> None:
    with rendezvous(job, []) as server:
        between = Between(server.address, record)
        assert gather_through(job, between.address) == [[SECRET, SECRET]] * 2
        between.close()
        assert (SECRET in between.seen) != job.encrypt
        assert b"sirtaki" in between.seen


def test_who_terminates_tls_before_a_rendezvous_is_refused_by_both_sides() -> None:
    events: list[RankEvent] = []
    with rendezvous(JOB, events) as server:
        between = Between(server.address, terminate_tls)
        with pytest.raises(HandshakeError, match="answers in its place") as caught:
            RendezvousClient.connect(between.address, JOB, Identity(0, 1), FAILSAFE_SECONDS)
        assert str(caught.value).startswith("the connection to the rendezvous cannot be encrypted: ")
        deadline = time.monotonic() + FAILSAFE_SECONDS
        while not events and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "the connection to rank 0 cannot be encrypted" in events[0].text
        assert "answers in its place" in events[0].text
        between.close()


def handshakes(rank: int, job: Job = JOB) -> Handshakes:
    return Handshakes(job, Identity(rank, 1), time.monotonic() + FAILSAFE_SECONDS)


def accept(listener: PeerListener, job: Job, found: dict[LinkKey, Connection]) -> None:
    listener.accept(handshakes(0, job), {(1, 0)}, found).finish()


def come(address: str, job: Job = JOB) -> Connection:
    mine = handshakes(1, job)
    found, _ = connect([address], lambda connection: mine.begin_handshake(connection, 0), mine.deadline)
    choose(found)
    return found


@pytest.mark.parametrize("job", [PLAIN, JOB], ids=["plain", "encrypted"])
def test_what_ranks_tell_each_other_is_seen_only_without_encryption(job: Job) -> None:
    found: dict[LinkKey, Connection] = {}
    with PeerListener() as listener, ThreadPoolExecutor(1) as pool:
        port = split_address(listener.listen_to_hosts([], job)[0])[1]
        between = Between(f"127.0.0.1:{port}", record)
        accepted = pool.submit(accept, listener, job, found)
        theirs = come(between.address, job)
        accepted.result(FAILSAFE_SECONDS)
        ours = found[1, 0]
        assert theirs.send(SECRET) == len(SECRET)
        ours.settimeout(FAILSAFE_SECONDS)
        received = b""
        while len(received) < len(SECRET):
            received += ours.recv(len(SECRET))
        assert received == SECRET
        assert (SECRET in between.seen) != job.encrypt
        theirs.close()
        assert ours.recv(1) == b""
        ours.close()
        between.close()


def test_who_terminates_tls_between_ranks_is_refused_by_both_sides() -> None:
    found: dict[LinkKey, Connection] = {}
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), PeerListener() as listener, ThreadPoolExecutor(1) as pool:
        port = split_address(listener.listen_to_hosts([], JOB)[0])[1]
        between = Between(f"127.0.0.1:{port}", terminate_tls)
        accepted = pool.submit(accept, listener, JOB, found)
        with pytest.raises(HandshakeError, match="the connection to rank 0 cannot be encrypted"):
            come(between.address)
        between.close()
        deadline = time.monotonic() + FAILSAFE_SECONDS
        while not errors.getvalue() and time.monotonic() < deadline:  # rank 0 listens until rank 1 has come
            time.sleep(0.01)
        direct = come(f"127.0.0.1:{port}")  # still works
        accepted.result(FAILSAFE_SECONDS)
        direct.close()
        found[1, 0].close()
    assert "rank 0 refused a connection" in errors.getvalue()
    assert "the connection to rank 1 cannot be encrypted" in errors.getvalue()


@pytest.mark.parametrize("encrypts", [0, 1])
def test_one_that_encrypts_and_one_that_does_not_refuse_each_other(encrypts: int) -> None:
    """The rejection works in both roles; neither side falls back to the other's mode."""
    events: list[RankEvent] = []
    jobs = (PLAIN, JOB)
    with rendezvous(jobs[1 - encrypts], events) as server:
        with pytest.raises(HandshakeError) as caught:
            RendezvousClient.connect(server.address, jobs[encrypts], Identity(1, 1), FAILSAFE_SECONDS)
        text = str(caught.value)
        assert f"encrypt is {1 - encrypts} on the rendezvous and {encrypts} on rank 1" in text
        assert "set SIRTAKI_ENCRYPT to one value for all ranks" in text
        deadline = time.monotonic() + FAILSAFE_SECONDS
        while not events and time.monotonic() < deadline:
            time.sleep(0.01)
        assert f"encrypt is {encrypts} on rank 1 and {1 - encrypts} on the rendezvous" in events[0].text


def test_unix_sockets_are_not_encrypted() -> None:
    address = "unix:@sirtaki-test-encryption"
    with RendezvousServer(address, JOB, FAILSAFE_SECONDS) as server:
        client = RendezvousClient.connect(server.address, JOB, Identity(0, 1), FAILSAFE_SECONDS)
        assert isinstance(client._connection, socket.socket)
        client.close()


def send_for_ever(connection: TlsConnection) -> None:
    while True:
        connection.send(bytes(1 << 20))


def test_a_connection_waits_no_longer_than_its_timeout() -> None:
    near, far = encrypt(*socket.socketpair())
    near.settimeout(0.05)
    with pytest.raises(TimeoutError):
        near.recv(1)
    with pytest.raises(TimeoutError):
        send_for_ever(near)
    near.settimeout(0)
    with pytest.raises(BlockingIOError):
        near.recv(1)
    far.close()
    near.settimeout(FAILSAFE_SECONDS)
    with pytest.raises(BrokenPipeError):
        send_for_ever(near)
    near.close()


class SlowLibrary:
    """The core, whose calls on a session last a while, and may not overlap: a session is for one thread."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._used: set[Any] = set()
        self.has_overlapped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def srt_tls_read(self, session: Any, *arguments: Any) -> int:
        return self._call(self._library.srt_tls_read, session, *arguments)

    def srt_tls_write(self, session: Any, *arguments: Any) -> int:
        return self._call(self._library.srt_tls_write, session, *arguments)

    def _call(self, function: Callable[..., int], session: Any, *arguments: Any) -> int:
        self.has_overlapped |= session in self._used
        self._used.add(session)
        time.sleep(0.001)
        moved = function(session, *arguments)
        self._used.discard(session)
        return moved


def test_a_thread_may_send_while_another_one_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SlowLibrary(encryption.lib)
    near, far = encrypt(*socket.socketpair())
    monkeypatch.setattr(encryption, "lib", library)
    messages = [Frame(MessageKind.GATHER, payload=bytes([number]) * 100) for number in range(100)]

    def send(connection: TlsConnection) -> None:
        for message in messages:
            send_frame(connection, message, time.monotonic() + FAILSAFE_SECONDS)

    def receive(connection: TlsConnection) -> list[Frame]:
        deadline = time.monotonic() + FAILSAFE_SECONDS
        return [receive_frame(connection, deadline, MessageKind) for _ in messages]

    for side in (near, far):
        side.settimeout(FAILSAFE_SECONDS)
    with ThreadPoolExecutor(4) as pool:
        received = [pool.submit(receive, side) for side in (near, far)]
        sent = [pool.submit(send, side) for side in (near, far)]
        assert [one.result() for one in received] == [messages, messages]
        assert [one.result() for one in sent] == [None, None]
    assert not library.has_overlapped
    near.close()
    far.close()


def test_without_openssl_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "_library", "libssl-of-nobody.so")
    with pytest.raises(RendezvousError, match="apt install libssl3") as caught:
        Certificate()
    assert "connections cannot be encrypted: libssl-of-nobody.so was not found" in str(caught.value)
