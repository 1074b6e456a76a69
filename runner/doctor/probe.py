"""The doctor's listener on a host, and the connections that other hosts' doctors make to it.

A connection begins with the token of this examination; what does not know it is closed. The listener takes a
bounded number of connections, each for a bounded time, and stores nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from sirtaki.bindings.bootstrap.connection.address import is_own_address, unmapped_address
from sirtaki.runner.doctor.facts import Attempt, Speed

TOKEN_BYTES = 32
_PROOF_BYTES, _ADDRESS_BYTES = 32, 64
_ECHO, _COUNT = b"E", b"C"
_RESULT = struct.Struct("!Qd")  # bytes received, and seconds
_MAX_CONNECTIONS = 256  # at a listener: all hosts may try it at once
_MAX_ADDRESSES = 16
_PAUSE_SECONDS = 0.1
_SECONDS_PER_STEP = 5.0
_COUNT_SECONDS, _SILENCE_SECONDS, _LONGEST_SECONDS = 0.4, 3.0, 8.0
_ROUND_TRIPS = 50
_STREAMS = 4
_CHUNK = bytes(256 * 1024)
_IP_MTU = 14  # of Linux, which Python does not name; IPv6 has a number of its own
_IPV6_MTU = 24


class Listener:
    """A port at which other hosts' doctors are answered, until this process ends."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._room = threading.Semaphore(_MAX_CONNECTIONS)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError:  # too many open files, or a connection that has gone already
                time.sleep(_PAUSE_SECONDS)
                continue
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._answer, args=(connection, address[0]), daemon=True).start()
            except RuntimeError:  # too many threads
                connection.close()
                self._room.release()

    def _answer(self, connection: socket.socket, address: str) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                self._serve(connection, address)
        finally:
            self._room.release()

    def _serve(self, connection: socket.socket, address: str) -> None:
        deadline = time.monotonic() + _SECONDS_PER_STEP
        token = _receive(connection, TOKEN_BYTES, deadline)
        if not hmac.compare_digest(token, self._token):
            return
        kind = _receive(connection, 1, deadline)
        connection.settimeout(_SECONDS_PER_STEP)
        connection.sendall(_proof(self._token) + unmapped_address(address).encode().ljust(_ADDRESS_BYTES))
        if kind == _ECHO:
            _echo(connection)
        elif kind == _COUNT:
            _count(connection)


def _echo(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(_ROUND_TRIPS):
        data = connection.recv(1)
        if not data:
            return
        connection.sendall(data)


def _count(connection: socket.socket) -> None:
    """Counts the bytes of a stream for a while, tells how many there were, and takes the rest."""
    buffer = bytearray(len(_CHUNK))
    connection.settimeout(_SILENCE_SECONDS)
    total, begin = 0, time.monotonic()
    try:
        total, begin = connection.recv_into(buffer, 1), time.monotonic()
        while total and time.monotonic() < begin + _COUNT_SECONDS:
            total += connection.recv_into(buffer)
    except TimeoutError:
        pass
    connection.sendall(_RESULT.pack(total, time.monotonic() - begin))
    until = time.monotonic() + _SECONDS_PER_STEP
    while time.monotonic() < until and connection.recv_into(buffer):
        pass


def reach(addresses: Sequence[str], port: int, token: bytes, seconds: float) -> list[Attempt]:
    """Tries to connect to all addresses at the same time, except this host's own addresses."""
    others = [address for address in addresses[:_MAX_ADDRESSES] if not _is_own(address)]
    if not others:
        return []
    with ThreadPoolExecutor(len(others)) as pool:
        return list(pool.map(lambda address: _attempt(address, port, token, seconds), others))


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return is_own_address(family, (address, 0))


def _attempt(address: str, port: int, token: bytes, seconds: float) -> Attempt:
    try:
        with _connect(address, port, token, _ECHO, seconds) as opened:
            source = unmapped_address(str(opened.socket.getsockname()[0]))
            return Attempt(address, "open", source, opened.seen_as, _path_mtu(opened.socket))
    except ConnectionRefusedError:
        return Attempt(address, "refused")
    except TimeoutError:
        return Attempt(address, "silent")
    except OSError as error:
        return Attempt(address, error.strerror or str(error))


def measure(address: str, port: int, token: bytes) -> Speed:
    """Measures a connection to a listener. Raises OSError if there is none."""
    round_trip = _round_trip(address, port, token)
    single = _rate(address, port, token, 1)
    several = _rate(address, port, token, _STREAMS) if single else 0.0
    return Speed(round_trip, single, several, _STREAMS, stalled=single == 0)


def _round_trip(address: str, port: int, token: bytes) -> float:
    with _connect(address, port, token, _ECHO, _SECONDS_PER_STEP) as opened:
        opened.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(_ROUND_TRIPS):
            begin = time.perf_counter()
            opened.socket.sendall(b"x")
            _receive(opened.socket, 1)
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def _rate(address: str, port: int, token: bytes, streams: int) -> float:
    """Returns bytes per second that arrive over so many connections at the same time; 0.0 if none does."""
    with ThreadPoolExecutor(streams) as pool:
        counted = list(pool.map(lambda _: _stream(address, port, token), range(streams)))
    return sum(total / seconds for total, seconds in counted if seconds > 0)


def _stream(address: str, port: int, token: bytes) -> tuple[int, float]:
    """Sends until the listener tells how much has come; returns bytes and seconds."""
    with _connect(address, port, token, _COUNT, _SECONDS_PER_STEP) as opened:
        connection = opened.socket
        connection.setblocking(False)
        received = b""
        deadline = time.monotonic() + _LONGEST_SECONDS
        while len(received) < _RESULT.size and (left := deadline - time.monotonic()) > 0:
            readable, writable, _ = select.select([connection], [connection], [], left)
            if readable:
                part = connection.recv(_RESULT.size - len(received))
                if not part:
                    break
                received += part
            elif writable:
                # The listener may have closed with unread bytes: its result has come before its reset.
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    connection.send(_CHUNK)
    total, seconds = _RESULT.unpack(received) if len(received) == _RESULT.size else (0, 0.0)
    return (total, seconds) if total > 1 else (0, 0.0)


class _Opened(NamedTuple):
    """A connection to a listener that has proved itself, and this host's address as it sees it."""

    socket: socket.socket
    seen_as: str

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()


def _connect(address: str, port: int, token: bytes, kind: bytes, seconds: float) -> _Opened:
    connection = socket.create_connection((address, port), seconds)
    try:
        connection.sendall(token + kind)
        answer = _receive(connection, _PROOF_BYTES + _ADDRESS_BYTES)
        if not hmac.compare_digest(answer[:_PROOF_BYTES], _proof(token)):
            raise OSError("another program answers there")
        return _Opened(connection, answer[_PROOF_BYTES:].decode("ascii", "replace").strip())
    except BaseException:
        connection.close()
        raise


def _proof(token: bytes) -> bytes:
    return hmac.digest(token, b"sirtaki doctor", "sha256")


def _receive(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Receives `count` bytes by a deadline; without it, the socket's timeout applies to each part."""
    data = b""
    while len(data) < count:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the other side is too slow")
            connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("the other side closed the connection")
        data += part
    return data


def _path_mtu(connection: socket.socket) -> int:
    is_v6 = connection.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if is_v6 else (socket.IPPROTO_IP, _IP_MTU)
    try:
        return connection.getsockopt(level, option)
    except OSError:
        return 0
