"""A peer with several addresses is reached at an address that leads to it."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.connection.connect import connect
from sirtaki.bindings.bootstrap.connection.handshake import HANDSHAKE_SECONDS, HandshakeSteps
from sirtaki.bindings.bootstrap.job import HandshakeError, Identity, RendezvousError, RendezvousTimeout


@pytest.fixture
def listening() -> Iterator[tuple[str, str]]:
    """Returns the addresses of two listeners that accept and send nothing."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        yield tuple(f"127.0.0.1:{one.getsockname()[1]}" for one in (first, second))  # type: ignore[misc]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def soon(seconds: float = FAILSAFE_SECONDS) -> float:
    return time.monotonic() + seconds


def port(connection: socket.socket) -> str:
    return f"127.0.0.1:{connection.getpeername()[1]}"


def begin_handshake(connection: socket.socket) -> HandshakeSteps:
    """Accepts any peer in a handshake; the returned rank is the peer's port."""
    yield b"", 0
    return Identity(connection.getpeername()[1])


def expect_a_byte(connection: socket.socket) -> HandshakeSteps:
    """Accepts any peer that sends a byte, as rank 1."""
    yield b"", 1
    return Identity(1)


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Runs `serve` with a listener in a thread, and yields the listener's address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(FAILSAFE_SECONDS)


def test_the_one_that_answers_is_kept(listening: tuple[str, str]) -> None:
    addresses = [free_address(), "192.0.2.1:9", listening[0]]  # a refused address, and an unreachable network
    connection, peer = connect(addresses, begin_handshake, soon())
    assert port(connection) == f"127.0.0.1:{peer.rank}" == listening[0]
    connection.close()


def test_who_is_not_who_he_should_be_is_left_for_another(listening: tuple[str, str]) -> None:
    def greet_the_second(connection: socket.socket) -> HandshakeSteps:
        if port(connection) == listening[0]:
            raise HandshakeError("somebody else")
        return begin_handshake(connection)

    connection, _ = connect(listening, greet_the_second, soon())
    assert port(connection) == listening[1]
    connection.close()


def test_nobody_is_greeted_again(listening: tuple[str, str]) -> None:
    greeted = []

    def refuse(connection: socket.socket) -> HandshakeSteps:
        greeted.append(port(connection))
        raise HandshakeError("somebody else")

    with pytest.raises(HandshakeError, match="somebody else"):
        connect(listening, refuse, soon())
    assert sorted(greeted) == sorted(listening)


def test_who_comes_late_is_waited_for() -> None:
    address = free_address()
    host, _, number = address.partition(":")
    come = threading.Event()

    def listen() -> None:
        time.sleep(0.3)
        with socket.create_server((host, int(number))):
            come.wait(FAILSAFE_SECONDS)

    thread = threading.Thread(target=listen)
    thread.start()
    connect([address], begin_handshake, soon())[0].close()
    come.set()
    thread.join()


def test_nobody_comes() -> None:
    addresses = [free_address(), free_address()]
    with pytest.raises(RendezvousTimeout) as caught:
        connect(addresses, begin_handshake, soon(0.2))
    for address in addresses:
        assert f"{address} (Connection refused)" in str(caught.value)
    begun = time.monotonic()
    with pytest.raises(RendezvousTimeout, match=r"unix:@sirtaki-nobody \(Connection refused\)"):
        connect(["unix:@sirtaki-nobody"], begin_handshake, soon())
    assert time.monotonic() - begun < FAILSAFE_SECONDS
    with pytest.raises(RendezvousError, match="there is no host"):
        connect(["no-such-host.invalid:1"], begin_handshake, soon())


def test_what_a_greeting_raises_comes_out(listening: tuple[str, str]) -> None:
    def interrupt(connection: socket.socket) -> HandshakeSteps:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect(listening, interrupt, soon())


def test_a_silent_address_does_not_hold_up_the_others(listening: tuple[str, str]) -> None:
    """The handshakes of all addresses run at the same time, each with seconds of patience."""

    def wait_for_the_first(connection: socket.socket) -> HandshakeSteps:
        if port(connection) in (listening[0], listening[1]):
            yield b"hello", 1  # no answer comes
        yield b"", 0
        return Identity(7)

    with socket.create_server(("127.0.0.1", 0)) as good:
        begun = time.monotonic()
        addresses = [*listening, f"127.0.0.1:{good.getsockname()[1]}"]
        connection, peer = connect(addresses, wait_for_the_first, soon())
        assert peer.rank == 7
        assert time.monotonic() - begun < HANDSHAKE_SECONDS / 2
        connection.close()


def test_a_full_queue_is_tried_again_until_there_is_room(tmp_path: Path) -> None:
    """A Unix socket whose queue is full answers EAGAIN: not connected, but no reason to stop dialing."""
    path = str(tmp_path / "listener")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as crowd:
        listener.bind(path)
        listener.listen(0)
        for _ in range(4):
            one = crowd.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            one.connect_ex(path)
        with pytest.raises(RendezvousTimeout, match="its queue is full"):
            connect([f"unix:{path}"], begin_handshake, soon(0.3))

        def make_room() -> None:
            time.sleep(0.3)
            for _ in range(2):
                listener.accept()[0].close()

        thread = threading.Thread(target=make_room)
        thread.start()
        connection, _ = connect([f"unix:{path}"], begin_handshake, soon())
        connection.close()
        thread.join()


def test_a_connection_that_is_closed_is_made_again() -> None:
    """A crowded listener closes the oldest unfinished connections: that is no rejection."""

    def serve(listener: socket.socket) -> None:
        listener.accept()[0].close()
        with listener.accept()[0] as accepted:
            accepted.sendall(b"x")
            accepted.recv(1)

    with server(serve) as address:
        connection, peer = connect([address], expect_a_byte, soon())
        assert peer.rank == 1
        connection.close()


def test_one_that_always_hangs_up_is_given_up() -> None:
    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    with (
        server(serve) as address,
        pytest.raises(HandshakeError, match="closed the connection: its key or its job is another one"),
    ):
        connect([address], expect_a_byte, soon())


def test_a_peer_that_is_refused_learns_from_whom() -> None:
    """The peer may read the hello before this side has sent its own."""
    ours = b"who I am"

    def greet_a_stranger(connection: socket.socket) -> HandshakeSteps:
        select.select([connection], [], [], FAILSAFE_SECONDS)
        yield ours, 1
        raise HandshakeError("a stranger")

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(connect, [f"127.0.0.1:{server.getsockname()[1]}"], greet_a_stranger, soon())
        stranger, _ = server.accept()
        with stranger:
            stranger.sendall(b"x")
            stranger.settimeout(FAILSAFE_SECONDS)
            assert stranger.recv(100) == ours
        with pytest.raises(HandshakeError, match="a stranger"):
            dialled.result(FAILSAFE_SECONDS)
