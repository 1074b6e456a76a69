"""The HTTP servers on hvdrun's host that the user has requested: metrics and dashboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sirtaki.runner.launch.process import Process
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.supervise.failure_analysis import signal_name

if TYPE_CHECKING:
    from sirtaki.runner.launch.starter import Settings


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
    """The servers of this host. `say` shows a line."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._running: list[Endpoint] = []

    def serve_metrics(self, address: str, folder: Path, reaper: Reaper) -> None:
        """Starts the server of metrics, and says its address. Raises LaunchError."""
        from sirtaki.runner.metrics.endpoint import MetricsEndpoint

        self._add(MetricsEndpoint(address, folder, reaper))

    def serve_page(self, address: str, folder: Path, reaper: Reaper) -> None:
        """Starts the server of the page, and says its address. Raises LaunchError."""
        from sirtaki.runner.dashboard.endpoint import Dashboard

        self._add(Dashboard(address, folder, reaper))

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


def start_endpoints(
    settings: Settings, folder: Path, reaper: Reaper, say: Callable[[str], object]
) -> Endpoints:
    """Starts the servers of hvdrun's own host that the settings name. Raises LaunchError."""
    endpoints = Endpoints(say)
    if settings.metrics is not None:
        endpoints.serve_metrics(settings.metrics, folder, reaper)
    if settings.dashboard is not None:
        endpoints.serve_page(settings.dashboard, folder, reaper)
    return endpoints


def _notice(endpoint: Endpoint, code: int, killed_by: int) -> str:
    ended = f"ended with exit code {code}"
    if killed_by:
        ended = f"was killed by signal {killed_by} ({signal_name(killed_by)})"
    return (
        f"the process that serves {endpoint.subject} (pid {endpoint.process.pid}) {ended}: the job goes on "
        "without it; `sirtaki top` shows its ranks"
    )
