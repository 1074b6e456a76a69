"""The HTTP servers on hvdrun's host that the user has requested: metrics and dashboard."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from sirtaki.bindings.observing.watch_marks import ALWAYS, FOLDER
from sirtaki.runner.cli.command import module_words
from sirtaki.runner.launch.errors import LaunchError, explained
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


# ---- The start of a process that serves HTTP on a host of a job: its address, its socket, its program --
# hvdrun and agents start ranks while a job runs, and must not have threads: each server is a process of its
# own, which delays nothing that they do. Its socket is bound before any rank starts, so that a port in use is
# an error of the start.


LOOPBACK = "127.0.0.1"
_WAITING_CLIENTS = 8


def parse_address(text: str) -> tuple[str, int]:
    """Returns the host, by default the loopback address, and the port of "PORT" or "HOST:PORT".

    Raises ValueError.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"it takes a port from 0 to 65535, or HOST:PORT, not '{text}'")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def listen(address: str, option: str) -> socket.socket:
    """Returns a socket that listens at the address of an option. Raises LaunchError, with the option."""
    host, port = parse_address(address)
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=_WAITING_CLIENTS)
    except OSError as error:
        is_name = isinstance(error, socket.gaierror)  # whose numbers are not those of the system's errors
        reason = error.strerror if is_name or error.errno is None else os.strerror(error.errno)
        raise LaunchError(
            f"{option}: cannot listen at port {port} of {host} on {socket.gethostname()}: {reason}. "
            "Choose another port, or 0 for one that is free",
            1,
        ) from None


def is_loopback(host: str) -> bool:
    """Returns whether only programs of this host reach a numeric address."""
    return host == "::1" or host.startswith("127.")


def authority(host: str, port: int) -> str:
    """Returns "HOST:PORT" as a URL has it."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def start_server(module: str, arguments: Sequence[str], listener: socket.socket, reaper: Reaper) -> Process:
    """Starts a module as a process that has the listening socket as its standard input.

    Raises LaunchError.
    """
    command = [sys.executable, *module_words(module), *arguments]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        with explained(f"cannot start {module}", 1):
            return Process(command, os.environ, reaper, (listener.fileno(), null, 2))
    finally:
        os.close(null)


# ---- A host's endpoint of metrics, started by hvdrun or by the agent of another host -------------------


def find_problem(address: str) -> str:
    """Returns why this host cannot serve metrics, to follow the host's name; "" if it can."""
    try:
        _listen(address).close()
    except LaunchError as error:
        return f"cannot serve metrics: {error}"
    return ""


class MetricsEndpoint:
    """The endpoint of this host: a process, and the mark for which the ranks write their states."""

    subject = "the metrics of this host"

    def __init__(self, address: str, job_folder: Path, reaper: Reaper) -> None:
        """Starts the endpoint. Raises LaunchError if that is impossible."""
        folder = job_folder / FOLDER
        with _listen(address) as listener:
            self._address = listener.getsockname()
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / ALWAYS).touch()
            self.process = start_server("sirtaki.runner.metrics.server", [str(folder)], listener, reaper)

    def describe(self) -> str:
        """Returns a line with the address, and a warning if other machines may reach it."""
        host, port = self._address[:2]
        text = f"metrics of the ranks of this host: http://{authority(host, port)}/metrics"
        return text if is_loopback(host) else f"{text} (neither encrypted nor protected by a password)"


def _listen(address: str) -> socket.socket:
    """Returns a socket that listens. Raises LaunchError if there is none, or nothing to serve it with."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise LaunchError(
            f"--metrics-port needs the package prometheus_client on {socket.gethostname()}: "
            "pip install 'sirtaki[metrics]'",
            1,
        )
    return listen(address, "--metrics-port")
