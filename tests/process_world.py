"""Ranks as processes under one launcher, which run body after body, each in a world of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("process") / "worker.py"
# Seconds: by default far longer than any correct run, even on a busy machine. A lent GPU has to fail sooner.
PATIENCE = float(os.environ.get("SIRTAKI_TEST_PATIENCE", "300"))


def hvdrun(ranks: int, *command: str | Path, **environment: str) -> list[str]:
    """Returns the command that starts `command` on `ranks` ranks, with further environment variables."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    prefix = ["env", *variables] if variables else []
    return [*prefix, sys.executable, "-m", "sirtaki.runner", "-np", str(ranks), *map(str, command)]


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; `options` are further ones of `subprocess.run`."""
    words = [str(part) for part in command]
    return subprocess.run(words, text=True, capture_output=True, timeout=PATIENCE, check=False, **options)


def output_of(*command: str | Path, **options: Any) -> str:
    """Runs a command that has to succeed; returns its output, then its errors."""
    finished = run(*command, **options)
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output
    return output


def run_program(
    folder: Path, source: str, ranks: int = 2, options: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program, `train.py` in this folder, on so many ranks until its end; `options` are Python's."""
    script = folder / "train.py"
    script.write_text(source)
    command = hvdrun(ranks, sys.executable, *options, script, **environment)
    return run(*command, cwd=folder)


def run_script(folder: Path, source: str, exit_code: int = 0, **settings: str) -> str:
    """Runs a program on three ranks, with these settings, until its end; returns its output."""
    environment = {f"SIRTAKI_{name.upper()}": value for name, value in settings.items()}
    ended = run_program(folder, source, 3, **environment)
    assert ended.returncode == exit_code, ended
    return ended.stdout


def may_read_siblings() -> bool:
    """Returns whether the system lets a process read the memory of others that are not its descendants."""
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    return not yama.exists() or yama.read_text().strip() == "0"


def free_address() -> str:
    """Returns an address on this machine with a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class ProcessWorld:
    """A number of ranks, started once; `run` runs a case on them."""

    def __init__(self, size: int, launcher: Sequence[str] = ()) -> None:
        """`launcher` is the start of a command that runs the rest on `size` ranks; hvdrun by default."""
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        path = os.path.join(self._folder.name, "control")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(size)
        self._listening.settimeout(PATIENCE)
        command = [*(launcher or hvdrun(size)), sys.executable, str(WORKER), path]
        self._output = open(os.path.join(self._folder.name, "output"), "w+")  # noqa: SIM115  # lives with the world
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)
        self._ranks: list[Any] = []

    def _accept(self) -> None:
        while len(self._ranks) < self.size:
            connection, _ = self._listening.accept()
            connection.settimeout(PATIENCE)
            self._ranks.append(connection.makefile("rw"))

    def run(self, case: str) -> None:
        """Runs a case on all ranks; raises AssertionError with the errors of the ranks where it failed.

        Skips the test if the case was skipped on all ranks.
        """
        self._accept()
        for rank in self._ranks:
            rank.write(json.dumps(case) + "\n")
            rank.flush()
        try:
            answers = [json.loads(rank.readline() or self._lost()) for rank in self._ranks]
        except TimeoutError:
            raise AssertionError(f"no answer in {PATIENCE:g} s:\n{self._written()}") from None
        failures = [answer for answer in answers if answer["error"]]
        if failures:
            raise AssertionError("\n".join(f"rank {a['rank']}:\n{a['error']}" for a in failures))
        if all(answer["skipped"] for answer in answers):
            pytest.skip(answers[0]["skipped"])
        assert not any(answer["skipped"] for answer in answers), answers

    def _lost(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)  # hvdrun's last line describes how the rank ended
        raise AssertionError(f"a rank has ended:\n{self._written()}")

    def _written(self) -> str:
        """Returns the output of the ranks until now."""
        self._output.seek(0)
        return self._output.read()

    def close(self) -> None:
        """Ends the ranks, by force if necessary."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.close()
        self._listening.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(PATIENCE)
        self._output.close()
        self._folder.cleanup()


class LatestWorld:
    """Runs cases on processes that stay for the next case, unless it fails or the next one needs others.

    Only one world is open at a time: with a framework imported, a rank takes 0.3 to 0.8 GB.
    """

    def __init__(self, launcher: Callable[..., list[str]] = hvdrun) -> None:
        """`launcher` returns the start of a command; its arguments are those of `run` without the name."""
        self._launcher = launcher
        self._command: list[str] = []
        self._world: ProcessWorld | None = None

    def __enter__(self) -> LatestWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, size: int, name: str, **environment: str) -> None:
        """Runs a case on so many ranks, which have these environment variables from their start."""
        command = self._launcher(size, **environment)
        if self._world is None or command != self._command:
            self.close()
            self._world, self._command = ProcessWorld(size, command), command
        try:
            self._world.run(name)
        except pytest.skip.Exception:
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes."""
        world, self._world = self._world, None
        if world is not None:
            world.close()


@pytest.fixture(scope="module")
def latest_world() -> Iterator[LatestWorld]:
    """The world of a module's tests, for the conftest.py of a folder."""
    with LatestWorld() as latest:
        yield latest
