"""Reads the output and the standard error of a child process in threads, line by line."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

MAX_LINE = 1 << 20  # bytes; a longer line counts as several lines


class ChildProcess:
    """A running child process.

    Attributes:
        process: the process; its standard input is open if `has_input`.
    """

    def __init__(
        self,
        command: Sequence[str],
        take_output: Callable[[str], object],
        take_error: Callable[[str], object],
        environment: Mapping[str, str] | None = None,
        has_input: bool = False,
    ) -> None:
        """Starts the process. Each function receives each line of its stream, then "" at the end."""
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=pipe if has_input else none, stdout=pipe, stderr=pipe, env=environment
        )
        streams = ((self.process.stdout, take_output), (self.process.stderr, take_error))
        self._readers = [
            threading.Thread(target=_read, args=stream_and_function, daemon=True)
            for stream_and_function in streams
        ]
        for reader in self._readers:
            reader.start()

    def end(self, seconds: float) -> int | None:
        """Waits for the exit code; kills the process and returns None if that takes longer."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None

    def join(self, seconds: float) -> None:
        """Waits until both streams have been read, or for so long: another process may have a stream open."""
        deadline = time.monotonic() + seconds
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))


def _read(stream: IO[bytes], take: Callable[[str], object]) -> None:
    with stream:
        while line := stream.readline(MAX_LINE):
            take(line.decode(errors="replace"))
    take("")
