"""The process that serves a host's metrics.

Usage: python -m sirtaki.runner.metrics.server FOLDER

Standard input is the listening socket. The ranks of this host write to the folder.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from sirtaki.runner.metrics.samples import RankSamples

MAX_CLIENTS = 8  # at once; the connections of further ones are closed
CLIENT_SECONDS = 10.0  # of silence, after which a connection is closed
CONNECTION_SECONDS = 30.0  # the longest time of a connection, however slowly its client sends


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Logs nothing: standard error is that of hvdrun."""


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _forgiving(application: Any) -> Any:
    """Returns the application with an answer to requests that it cannot read, instead of a traceback."""

    def answer(environment: Any, start_response: Any) -> Any:
        try:
            return application(environment, start_response)
        except Exception:
            start_response("400 Bad Request", [("Content-Type", "text/plain")])
            return [b"this request cannot be read\n"]

    return answer


class MetricsServer(ThreadingMixIn, WSGIServer):
    """An HTTP server at a socket that is listening already."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = map(str, listener.getsockname()[:2])  # type: ignore[assignment]
        self.setup_environ()
        registry = CollectorRegistry()
        registry.register(RankSamples(folder))
        self.set_app(_forgiving(make_wsgi_app(registry)))
        self._room = threading.BoundedSemaphore(MAX_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(CONNECTION_SECONDS, _shut_down, [request])
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores the errors of a connection, which are those of its client."""


def main() -> None:
    MetricsServer(socket.socket(fileno=0), Path(sys.argv[1])).serve_forever()


if __name__ == "__main__":
    main()
