"""The start of a job's page by hvdrun."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from sirtaki.runner.dashboard.access import TOKEN_FILE
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.observe.bounded_server import is_wildcard
from sirtaki.runner.observe.endpoints import authority, is_loopback, listen, parse_address, start_server


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
