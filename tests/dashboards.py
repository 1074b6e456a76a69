"""Serves the page of `hvdrun --dashboard` in this process, for jobs that are made up."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rank_samples import NOW, SINCE

from sirtaki.runner.dashboard.access import Access
from sirtaki.runner.dashboard.feed import Feed
from sirtaki.runner.dashboard.server import DashboardServer
from sirtaki.runner.top.snapshot import RankSample, Snapshot

TOKEN = "the-token"
LOOPBACK = "127.0.0.1"


class Served(NamedTuple):
    """A page that is served: its address, and the feed behind it."""

    port: int
    feed: Feed

    def get(self, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        """Returns the answer to a request; the names of headers have _ for -."""
        return request(self.port, path, method, **headers)

    def cookie(self) -> str:
        """Uses the token up, and returns the Cookie header of the browser that has used it."""
        return cookie_of(self.get(f"/?token={TOKEN}"))


def request(port: int, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    return connection.getresponse()


def cookie_of(answer: http.client.HTTPResponse) -> str:
    return (answer.getheader("Set-Cookie") or "").partition(";")[0]


def events_of(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """Yields the kinds and contents of Server-Sent Events."""
    kind = ""
    for line in answer:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


def snapshot(second: float, *ranks: RankSample) -> Snapshot:
    """Returns a snapshot of a made-up job, some seconds after NOW."""
    return Snapshot(NOW + second, SINCE, "sirtaki-x", ranks)


@contextlib.contextmanager
def serve(source: Callable[[], Iterator[Snapshot]]) -> Iterator[Served]:
    """Serves the page of a job with these snapshots, which has begun 60 s before NOW."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    feed = Feed(source, NOW - 60)
    server = DashboardServer(listener, Access(TOKEN, LOOPBACK, (LOOPBACK, port)), feed)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Served(port, feed)
    finally:
        feed.end()
        server.shutdown()
        thread.join()
        server.server_close()
