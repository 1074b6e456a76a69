"""The start of a host's metrics endpoint, by hvdrun or by the agent of another host."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

from sirtaki.bindings.observing.watch_marks import ALWAYS, FOLDER
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.observe.listening import authority, is_loopback, listen, start_server


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
