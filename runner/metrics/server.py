"""The process that serves a host's metrics.

Usage: python -m sirtaki.runner.metrics.server FOLDER

Standard input is the listening socket. The ranks of this host write to the folder.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from sirtaki.runner.bounded_server import CLIENT_SECONDS, BoundedServer
from sirtaki.runner.metrics.samples import RankSamples

MAX_CLIENTS = 8  # at once; the connections of further ones are closed


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Logs nothing: standard error is that of hvdrun."""


def _forgiving(application: Any) -> Any:
    """Returns the application with an answer to requests that it cannot read, instead of a traceback."""

    def answer(environment: Any, start_response: Any) -> Any:
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
        self.set_app(_forgiving(make_wsgi_app(registry)))


def main() -> None:
    MetricsServer(socket.socket(fileno=0), Path(sys.argv[1])).serve_forever()


if __name__ == "__main__":
    main()
