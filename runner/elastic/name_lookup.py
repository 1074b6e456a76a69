"""Finds out which names of hosts mean this machine, without waiting for name servers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable

from sirtaki.runner.command import module_words
from sirtaki.runner.hosts import OWN_HOST

_COMMAND = (sys.executable, *module_words("sirtaki.runner.own_host"))
_LIMIT_SECONDS = 60.0  # for the names of one answer; those that were found by then are kept


class NameLookup:
    """The names that were looked up so far, each once in a job.

    One that could not be looked up counts as that of another machine, which perhaps only ssh knows, and is
    looked up again for the next answer.

    A process of its own looks them up: hvdrun's loop, which answers the leases of other hosts, must not wait,
    and has no threads, because it forks workers.
    """

    def __init__(self) -> None:
        self._is_own = {OWN_HOST: True}
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this
        self._started = 0.0

    def start(self, names: Iterable[str], now: float) -> None:
        """Begins to look up those of the names that are not known. Raises OSError if that is impossible."""
        unknown = dict.fromkeys(name for name in names if name not in self._is_own)
        if not unknown:
            return
        self._output.seek(0)
        self._output.truncate()
        with tempfile.TemporaryFile() as file:
            file.write("".join(f"{name}\n" for name in unknown).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                _COMMAND, stdin=file, stdout=self._output, stderr=subprocess.DEVNULL, start_new_session=True
            )
        self._started = now

    def poll(self, now: float) -> bool:
        """Returns whether the look-ups have ended; ends them when they take too long."""
        if self._process is None:
            return True
        if self._process.poll() is None:
            if now >= self._started + _LIMIT_SECONDS:
                self._process.kill()
            return False
        self._process = None
        self._take_results()
        return True

    def is_own(self, name: str) -> bool:
        """Returns whether a name is known to mean this machine."""
        return self._is_own.get(name, False)

    def close(self) -> None:
        """Ends look-ups in progress."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._output.close()

    def _take_results(self) -> None:
        self._output.seek(0)
        for line in self._output.read().decode(errors="replace").splitlines():
            is_own, _, name = line.partition(" ")
            self._is_own[name] = is_own == "1"
