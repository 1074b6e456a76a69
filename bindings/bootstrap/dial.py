"""Connecting to who listens at one of several addresses, and making sure that it is who it should be.

All addresses are tried at the same time, as in "Happy Eyeballs" (RFC 8305): a machine may be known by
addresses that do not lead to it from here (a container's bridge, another network), or that lead to somebody
else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

from .address import is_unix, resolve_all, split_address, unix_path, unknown_host
from .handshake import BootstrapError, BootstrapTimeout

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between attempts to reach who is not listening yet
_ATTEMPT_SECONDS = 5.0  # for all addresses to answer, before they are tried again

Greeted = TypeVar("Greeted")


def dial(
    addresses: Sequence[str], greet: Callable[[socket.socket], Greeted], deadline: float
) -> tuple[socket.socket, Greeted]:
    """Connects to the first of `addresses` that answers and that `greet` accepts; returns what that returned.

    Where nobody listens yet is tried again until the deadline (time.monotonic()); but not an abstract Unix
    socket, which is there from the beginning or never, and not who was greeted in vain.

    Raises BootstrapTimeout if nobody answers in time, else what `greet` has raised last.
    """
    pause = _FIRST_PAUSE
    while True:
        attempt = _Attempt(addresses)
        with contextlib.closing(attempt):
            refusal: BootstrapError | None = None
            for connection in attempt.answers(min(deadline, time.monotonic() + _ATTEMPT_SECONDS)):
                try:
                    return connection, greet(connection)
                except BootstrapError as error:
                    connection.close()
                    refusal = error
                except BaseException:
                    connection.close()
                    raise
        if refusal is not None:
            raise refusal
        if time.monotonic() + pause >= deadline or all(map(is_unix, addresses)):
            raise BootstrapTimeout(f"nobody answers at {attempt.failures()}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


class _Attempt:
    """One connection attempt to each address, all at the same time."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._selector = selectors.DefaultSelector()
        self._failures: dict[str, str] = dict.fromkeys(addresses, "no answer")
        self._ready: list[socket.socket] = []
        for address in addresses:
            self._begin(address)

    def answers(self, until: float) -> Iterator[socket.socket]:
        """The connections, as they are made; the caller owns them."""
        while True:
            while self._ready:
                connection = self._ready.pop(0)
                connection.setblocking(True)
                yield connection
            left = until - time.monotonic()
            if not self._selector.get_map() or left <= 0:
                return
            for key, _ in self._selector.select(left):
                connection = cast(socket.socket, key.fileobj)
                self._selector.unregister(connection)
                self._finish(key.data, connection, connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def failures(self) -> str:
        """Each address and why there is no connection to it."""
        return ", ".join(f"{address} ({why})" for address, why in self._failures.items())

    def close(self) -> None:
        for key in list((self._selector.get_map() or {}).values()):
            cast(socket.socket, key.fileobj).close()
        for connection in self._ready:
            connection.close()
        self._selector.close()

    def _begin(self, address: str) -> None:
        if is_unix(address):
            self._connect(address, socket.AF_UNIX, unix_path(address))
            return
        host, port = split_address(address)
        try:
            places = resolve_all(host, port)
        except socket.gaierror as error:
            # A pod's name is known a while after the pod has started.
            if error.errno == socket.EAI_AGAIN or "KUBERNETES_SERVICE_HOST" in os.environ:
                self._failures[address] = f"its name is not known yet: {error.strerror}"
                return
            raise unknown_host(host, error) from None
        for family, place in places:
            self._connect(address, family, place)

    def _connect(self, address: str, family: int, place: str | tuple[str, int]) -> None:
        try:
            connection = socket.socket(family)
        except OSError as error:  # no IPv6 here
            self._failures[address] = error.strerror or str(error)
            return
        connection.setblocking(False)
        code = connection.connect_ex(place)
        if code in (errno.EINPROGRESS, errno.EAGAIN):
            self._selector.register(connection, selectors.EVENT_WRITE, address)
        else:
            self._finish(address, connection, code)

    def _finish(self, address: str, connection: socket.socket, code: int) -> None:
        if code:
            self._failures[address] = os.strerror(code)
            connection.close()
            return
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ready.append(connection)
