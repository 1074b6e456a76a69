"""The hvdrun side of a conversation with an agent, for tests."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.connection.wire import FROM, Frame, MessageKind, Sender, take_frame
from sirtaki.runner.hosts.channel import LoginOutput

KEY = bytes(range(32))


class Conversation:
    """The hvdrun side of the connection to an agent."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._input, self._output = process.stdin, process.stdout
        self._frames = self._read()
        self._passed: list[Frame] = []

    def say(self, *frames: Frame) -> None:
        self._input.write(b"".join(frame.pack() for frame in frames))
        self._input.flush()

    def next(self, kind: MessageKind) -> Frame:
        """Returns the next frame of a kind; keeps earlier frames: output and endings have no fixed order."""
        for frame in self._passed:
            if frame.kind == kind:
                self._passed.remove(frame)
                return frame
        for frame in self._frames:
            if frame.kind == kind:
                return frame
            self._passed.append(frame)
        raise AssertionError(f"the agent ended without {kind.name}")

    def until(self, kind: MessageKind) -> list[Frame]:
        """Returns the frames before the next frame of a kind."""
        return list(itertools.takewhile(lambda frame: frame.kind != kind, self._frames))

    def end(self) -> tuple[int, str]:
        """Ends the agent's input; returns its exit code, and its error output."""
        _, errors = self.process.communicate(timeout=FAILSAFE_SECONDS)
        return self.process.returncode, errors.decode()

    def _read(self) -> Iterator[Frame]:
        login, data_of_agent = LoginOutput(), bytearray()
        deadline = time.monotonic() + FAILSAFE_SECONDS
        while data := os.read(self._output.fileno(), 65536):
            assert time.monotonic() < deadline, "the agent did not send what was awaited"
            data_of_agent += login(data)
            while (frame := take_frame(data_of_agent, FROM[Sender.AGENT])) is not None:
                yield frame


@contextmanager
def agents(folder: Path) -> Iterator[Callable[[], Conversation]]:
    """Returns a function that starts an agent, which keeps its files in this folder."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> Conversation:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        environment = {**os.environ, "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "sirtaki.runner.hosts.agent"]
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return Conversation(started[-1])

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=FAILSAFE_SECONDS)


def values(*command: str) -> dict[str, Any]:
    """Returns START's values for one rank."""
    return {
        "job": "j",
        "key": KEY.hex(),
        "rendezvous": "127.0.0.1:1",
        "start_timeout": 5.0,
        "command": command,
        "environment": {},
        "additions": {},
        "placements": [[0, 1, 0, 1, 0, 1]],
    }


def ask(program: str = sys.executable) -> Frame:
    return Frame.of(MessageKind.ASK, {"folder": "/", "program": program})
