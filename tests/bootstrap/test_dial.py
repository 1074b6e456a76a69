"""Whoever has several addresses is reached at the one that leads to him."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from sirtaki._core.bootstrap.dial import dial
from sirtaki._core.bootstrap.handshake import BootstrapError, BootstrapTimeout, HandshakeError

FAILSAFE_SECONDS = 30.0


@pytest.fixture
def listening() -> Iterator[tuple[str, str]]:
    """Two listeners that accept and say nothing: their addresses."""
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


def test_the_one_that_answers_is_kept(listening: tuple[str, str]) -> None:
    addresses = [free_address(), "192.0.2.1:9", listening[0]]  # refused, and a network that is nowhere
    connection, greeting = dial(addresses, port, soon())
    assert greeting == listening[0]
    connection.close()


def test_who_is_not_who_he_should_be_is_left_for_another(listening: tuple[str, str]) -> None:
    def greet(connection: socket.socket) -> str:
        if port(connection) == listening[0]:
            raise HandshakeError("somebody else")
        return port(connection)

    connection, greeting = dial(listening, greet, soon())
    assert greeting == listening[1]
    connection.close()


def test_nobody_is_greeted_again(listening: tuple[str, str]) -> None:
    greeted = []

    def greet(connection: socket.socket) -> None:
        greeted.append(port(connection))
        raise HandshakeError("somebody else")

    with pytest.raises(HandshakeError, match="somebody else"):
        dial(listening, greet, soon())
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
    dial([address], port, soon())[0].close()
    come.set()
    thread.join()


def test_nobody_comes() -> None:
    addresses = [free_address(), free_address()]
    with pytest.raises(BootstrapTimeout) as caught:
        dial(addresses, port, soon(0.2))
    for address in addresses:
        assert f"{address} (Connection refused)" in str(caught.value)
    begun = time.monotonic()
    with pytest.raises(BootstrapTimeout, match=r"unix:@sirtaki-nobody \(Connection refused\)"):
        dial(["unix:@sirtaki-nobody"], port, soon())
    assert time.monotonic() - begun < FAILSAFE_SECONDS
    with pytest.raises(BootstrapError, match="there is no host"):
        dial(["no-such-host.invalid:1"], port, soon())


def test_what_a_greeting_raises_comes_out(listening: tuple[str, str]) -> None:
    def greet(connection: socket.socket) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dial(listening, greet, soon())
