"""The HTTP servers on hvdrun's host that the user has requested: metrics and dashboard."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sirtaki.runner.dashboard.access import TOKEN_FILE
from sirtaki.runner.launch.process import Process
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.observe.bounded_server import is_wildcard
from sirtaki.runner.observe.listening import authority, is_loopback, listen, parse_address, start_server
from sirtaki.runner.supervise.failure_analysis import signal_name

if TYPE_CHECKING:
    from sirtaki.runner.launch.job import Settings


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


def metrics_question(settings: Settings) -> dict[str, str]:
    """Returns what other hosts are asked about metrics: whether the port is free there."""
    return {} if settings.metrics is None else {"metrics": settings.metrics}


def _notice(endpoint: Endpoint, code: int, killed_by: int) -> str:
    ended = f"ended with exit code {code}"
    if killed_by:
        ended = f"was killed by signal {killed_by} ({signal_name(killed_by)})"
    return (
        f"the process that serves {endpoint.subject} (pid {endpoint.process.pid}) {ended}: the job goes on "
        "without it; `sirtaki top` shows its ranks"
    )


# ---- The start of a job's page by hvdrun ---------------------------------------------------------------


class Dashboard:
    """The page of the ranks of this host: a process that serves it, and its address with a token."""

    subject = "the page of this job"

    def __init__(self, address: str, job_folder: Path, reaper: Reaper) -> None:
        """Starts the process. Raises LaunchError if that is impossible."""
        self._host = parse_address(address)[0]
        self._token = secrets.token_urlsafe(32)
        with listen(address, "--dashboard") as listener:
            self._address = listener.getsockname()
            _write_private(job_folder / TOKEN_FILE, self._token)  # command lines can be read by others
            arguments = [str(job_folder), self._host]
            self.process = start_server("sirtaki.runner.dashboard.server", arguments, listener, reaper)

    def describe(self) -> str:
        """Returns a line with the address, and a warning if other machines may reach it."""
        number, port = self._address[:2]
        host = socket.gethostname() if is_wildcard(number) else self._host
        url = f"http://{authority(host, port)}/?token={self._token}"
        text = f"the page of this job, which one browser can open once: {url}"
        return text if is_loopback(number) else f"{text} (not encrypted: others on the network can read it)"


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
