"""An HTTP server at a socket that is listening already, with bounds on its clients."""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

CLIENT_SECONDS = 10.0  # of silence, after which a connection is closed: the `timeout` of handlers
CONNECTION_SECONDS = 30.0  # the longest time of a connection, however slowly its client sends


class BoundedServer(ThreadingMixIn, HTTPServer):
    """Serves each client in a thread. The connections of clients beyond the bound are closed."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: Any, max_clients: int) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()[:2]
        self._room = threading.BoundedSemaphore(max_clients)
        self._ends: dict[Any, threading.Timer] = {}  # by connection

    def keep_open(self, connection: Any) -> None:
        """Lets a connection last for as long as its client reads."""
        self._ends[connection].cancel()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._ends[request] = end = threading.Timer(CONNECTION_SECONDS, _shut_down, [request])
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            del self._ends[request]
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores the errors of a connection, which are those of its client."""


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)
