"""Serves the page of `hvdrun --dashboard` in this process, for jobs that are made up."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from launching import Start, wait_until
from rank_samples import NOW, SINCE

from sirtaki.runner.dashboard.access import Access
from sirtaki.runner.dashboard.feed import Feed
from sirtaki.runner.dashboard.server import DashboardServer, JobRecordings
from sirtaki.runner.observe.state_shape import RankSample
from sirtaki.runner.top.snapshot import Snapshot

TOKEN = "the-token"
LOOPBACK = "127.0.0.1"
NO_JOB = Path("/nowhere/sirtaki-x")
URL = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43})(?!\S)")

# Ranks that sum until the file "end" exists, in a job of either kind.
SUMMING = """
import pathlib, sys, time
import numpy
import sirtaki.numpy as hvd

def train(state):
    while hvd.allreduce(numpy.float32(not (pathlib.Path(sys.argv[1]) / "end").exists()), name="loss") > 0.5:
        time.sleep(0.01)

hvd.init()
if "elastic" in sys.argv:
    train = hvd.elastic.run(train)
train(hvd.elastic.ObjectState())
"""


# Options of two ranks, by the kind of their job.
KINDS = {"fixed": (), "elastic": ("--min-np", "2"), "elsewhere": ("-H", "hostB:2")}


def start_summing(
    start: Start, folder: Path, *options: str, kind: str = "fixed", **more: object
) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts ranks that sum until `end` is in this folder; returns hvdrun, and the file of its errors."""
    (script := folder / "training.py").write_text(SUMMING)
    with (folder / "errors").open("wb") as errors:
        job = start(*options, "python", str(script), str(folder), kind, stderr=errors, **more)
    return job, folder / "errors"


class Served(NamedTuple):
    """A page that is served: its address, and the feed behind it."""

    port: int
    feed: Feed
    action_token: str

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


def address_in(output: Path) -> tuple[int, str]:
    """Returns the port and the token that hvdrun has printed."""
    wait_until(lambda: URL.search(output.read_text()), "hvdrun has printed the address of the page")
    ((port, token),) = URL.findall(output.read_text())
    return int(port), token


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
def serve(source: Callable[[], Iterator[Snapshot]], job: Path = NO_JOB) -> Iterator[Served]:
    """Serves the page of a job with these snapshots, which has begun 60 s before NOW.

    `job` is its private folder, in which recordings come, too.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    recordings = JobRecordings(job, job)
    feed = Feed(source, NOW - 60, lambda: recordings.view)
    access = Access(TOKEN, LOOPBACK, (LOOPBACK, port))
    server = DashboardServer(listener, access, feed, recordings)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Served(port, feed, access.action_token)
    finally:
        feed.end()
        server.shutdown()
        thread.join()
        server.server_close()
