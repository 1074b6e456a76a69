"""An HTTP server at a socket that is listening already: bounds on its clients, and the names of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from http.server import HTTPServer
from socket import AF_INET, AF_INET6
from socketserver import ThreadingMixIn
from typing import Any

import psutil

from sirtaki.runner.observe.endpoints import authority

CLIENT_SECONDS = 10.0  # of silence, after which a connection is closed: the `timeout` of handlers
CONNECTION_SECONDS = 30.0  # the longest time of a connection, however slowly its client sends
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


class BoundedServer(ThreadingMixIn, HTTPServer):
    """Serves each client in a thread.

    Anybody who reaches the port can connect. A client beyond the bound takes the place of the oldest one of
    the address with the most clients, unless all are clients whose connections were kept open.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: Any, max_clients: int) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()[:2]
        self._max_clients = max_clients
        self._lock = threading.Lock()
        self._clients: dict[Any, str] = {}  # addresses by connections, the oldest first
        self._kept: dict[Any, str] = {}  # those of which `keep_open` was called
        self._ends: dict[Any, threading.Timer] = {}  # by connection

    def keep_open(self, connection: Any) -> None:
        """Cancels a connection's time limit: it stays open for as long as its client reads."""
        self._ends[connection].cancel()
        with self._lock:
            if connection in self._clients:
                self._kept[connection] = self._clients.pop(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._clients) + len(self._kept) >= self._max_clients:
                self._drop_client()
            has_room = len(self._clients) + len(self._kept) < self._max_clients
            if has_room:
                self._clients[request] = str(client_address[0])
        if not has_room:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._forget(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._ends[request] = end = threading.Timer(CONNECTION_SECONDS, _shut_down, [request])
        try:
            end.start()
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            del self._ends[request]
            self._forget(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores an error of a connection: the client caused it."""

    def _drop_client(self) -> None:
        """Closes the oldest connection of the address with the most; the lock is held."""
        if self._clients:
            busiest = Counter(self._clients.values()).most_common(1)[0][0]
            oldest = next(client for client, address in self._clients.items() if address == busiest)
            del self._clients[oldest]
            _shut_down(oldest)  # which ends its thread

    def _forget(self, connection: Any) -> None:
        with self._lock:
            self._clients.pop(connection, None)
            self._kept.pop(connection, None)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def hosts_of(host: str, number: str, port: int) -> frozenset[str]:
    """Returns the Host headers that name a server: on all interfaces, any name or address of this host.

    Browsers write addresses in their shortest form, like the system's `number`, whatever the user has given.
    """
    names = {host, number, *_LOOPBACK_NAMES}
    if is_wildcard(number):
        names |= {socket.gethostname(), *own_addresses()}
    found = {authority(name, port).lower() for name in names}
    return frozenset(found | ({name.removesuffix(":80") for name in found} if port == 80 else set()))


def is_wildcard(host: str) -> bool:
    """Returns whether a numeric address stands for all interfaces."""
    return host in ("0.0.0.0", "::")


def own_addresses() -> set[str]:
    """Returns the addresses of this machine's network interfaces, without their scopes."""
    addresses = [address for several in psutil.net_if_addrs().values() for address in several]
    return {
        address.address.partition("%")[0] for address in addresses if address.family in (AF_INET, AF_INET6)
    }
