"""The HTTP servers on hvdrun's host that the user has requested: metrics and dashboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sirtaki.runner.launch.process import Process
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.supervise.failure_analysis import killed_by


class Endpoint(Protocol):
    """A server, which should run for as long as the job.

    Attributes:
        process: serves.
        subject: what it serves, for people.
    """

    process: Process
    subject: str

    def describe(self) -> str:
        """Returns a line with the address."""


class Endpoints:
    """The servers of this host. `folder` is the job's, `say` shows a line."""

    def __init__(self, folder: Path, reaper: Reaper, say: Callable[[str], object]) -> None:
        self._folder, self._reaper = folder, reaper
        self._say = say
        self._running: list[Endpoint] = []

    def serve_metrics(self, address: str | None) -> None:
        """Starts the server of metrics, if it has an address, and says that. Raises LaunchError."""
        if address is not None:
            from sirtaki.runner.metrics.endpoint import MetricsEndpoint

            self._add(MetricsEndpoint(address, self._folder, self._reaper))

    def serve_page(self, address: str | None) -> None:
        """Starts the server of the page, if it has an address, and says that. Raises LaunchError."""
        if address is not None:
            from sirtaki.runner.dashboard.endpoint import Dashboard

            self._add(Dashboard(address, self._folder, self._reaper))

    def _add(self, endpoint: Endpoint) -> None:
        self._running.append(endpoint)
        self._say(endpoint.describe())

    def check(self) -> None:
        """Says, once, if a server has ended, of which only its clients would notice something."""
        for endpoint in list(self._running):
            if (end := endpoint.process.poll()) is not None:
                self._running.remove(endpoint)
                self._say(_notice(endpoint, *end))

    def release(self) -> None:
        """Stops watching the servers: they end with the job."""
        self._running.clear()


def _notice(endpoint: Endpoint, code: int, number: int) -> str:
    ended = f"was {killed_by(number)}" if number else f"ended with exit code {code}"
    return (
        f"the process that serves {endpoint.subject} (pid {endpoint.process.pid}) {ended}: the job goes on "
        "without it; `sirtaki top` shows its ranks"
    )
