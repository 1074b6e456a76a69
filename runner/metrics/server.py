"""The process that serves a host's metrics.

Usage: python -m sirtaki.runner.metrics.server FOLDER

Standard input is the listening socket. The ranks of this host write to the folder.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from sirtaki.runner.bounded_server import CLIENT_SECONDS, BoundedServer, hosts_of
from sirtaki.runner.listening import is_loopback
from sirtaki.runner.metrics.samples import RankSamples

MAX_CLIENTS = 8  # at once


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Logs nothing: standard error is that of hvdrun."""


def _guarded(application: Any, hosts: Collection[str]) -> Any:
    """Returns the application with an answer to requests that it cannot read, instead of a traceback, and to
    requests for other hosts than these, if there are any: to a web page whose name was made to stand for this
    address (DNS rebinding).
    """

    def answer(environment: Any, start_response: Any) -> Any:
        if hosts and environment.get("HTTP_HOST", "").lower() not in hosts:
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"this is not the address of the metrics\n"]
        try:
            return application(environment, start_response)
        except Exception:
            start_response("400 Bad Request", [("Content-Type", "text/plain")])
            return [b"this request cannot be read\n"]

    return answer


class MetricsServer(BoundedServer, WSGIServer):
    """Answers each request with the metrics of that moment."""

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        super().__init__(listener, _Handler, MAX_CLIENTS)
        self.setup_environ()
        registry = CollectorRegistry()
        registry.register(RankSamples(folder))
        number, port = listener.getsockname()[:2]
        hosts = hosts_of(number, number, port) if is_loopback(number) else frozenset()
        self.set_app(_guarded(make_wsgi_app(registry), hosts))


def main() -> None:
    MetricsServer(socket.socket(fileno=0), Path(sys.argv[1])).serve_forever()


if __name__ == "__main__":
    main()
