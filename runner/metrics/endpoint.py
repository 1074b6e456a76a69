"""The start of a host's metrics endpoint, by hvdrun or by the agent of another host.

The endpoint is a process of its own (`sirtaki.runner.metrics.server`): hvdrun and agents start ranks while a
job runs, and must not have threads; and no scrape delays what they do. Its socket is bound before any rank
starts, so that a port in use is an error of the start.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path

from sirtaki.bindings.state_file import ALWAYS, FOLDER
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.process import Process
from sirtaki.runner.reaper import Reaper

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


def find_problem(address: str) -> str:
    """Returns why this host cannot serve metrics, to follow the host's name; "" if it can."""
    try:
        _listen(address).close()
    except LaunchError as error:
        return f"cannot serve metrics: {error}"
    return ""


class MetricsEndpoint:
    """The endpoint of this host: a process, and the mark for which the ranks write their states."""

    def __init__(self, address: str, job_folder: Path, reaper: Reaper) -> None:
        """Starts the endpoint. Raises LaunchError if that is impossible."""
        folder = job_folder / FOLDER
        with _listen(address) as listener:
            self._address = listener.getsockname()
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / ALWAYS).touch()
            self._process = _start(listener, folder, reaper)

    def describe(self) -> str:
        """Returns a line with the address, and a warning if other machines may reach it."""
        host, port = self._address[:2]
        text = (
            f"metrics of the ranks of this host: http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
        )
        is_private = host == "::1" or host.startswith("127.")
        return text if is_private else f"{text} (neither encrypted nor protected by a password)"


def _listen(address: str) -> socket.socket:
    """Returns a socket that listens. Raises LaunchError if there is none, or nothing to serve it with."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise LaunchError(
            f"--metrics-port needs the package prometheus_client on {socket.gethostname()}: "
            "pip install 'sirtaki[metrics]'",
            1,
        )
    host, port = parse_address(address)
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=_WAITING_CLIENTS)
    except OSError as error:
        is_name = isinstance(error, socket.gaierror)  # whose numbers are not those of the system's errors
        reason = error.strerror if is_name or error.errno is None else os.strerror(error.errno)
        raise LaunchError(
            f"--metrics-port: cannot listen at port {port} of {host} on {socket.gethostname()}: {reason}. "
            "Choose another port, or 0 for one that is free",
            1,
        ) from None


def _start(listener: socket.socket, folder: Path, reaper: Reaper) -> Process:
    """Starts the process, which finds the listening socket at its standard input."""
    command = [sys.executable, "-m", "sirtaki.runner.metrics.server", str(folder)]
    # The current folder is the user's, and may have files named like modules.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        return Process(command, environment, reaper, (listener.fileno(), null, 2))
    except OSError as error:
        raise LaunchError(f"cannot start the metrics endpoint: {error.strerror}", 1) from None
    finally:
        os.close(null)
