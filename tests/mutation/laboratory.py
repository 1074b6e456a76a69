"""Runs the tests of one mutant, and reports whether they detected it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
from mutants import ROOT, Mutant, TableError
from native import LIBRARY, Build, BuildError
from overlay import Overlay

BASE_LIMIT = 30.0  # seconds that a selection may take with a mutant, in addition
LIMIT_FACTOR = 5.0  # times its duration without the mutant: only a hang takes longer
_PYTEST_MISUSED = (3, 4, 5)  # pytest's own error, invalid arguments, and no tests found
_MARK = "MUTATION_TRIAL"  # in the environment of all processes of a trial


@dataclass(frozen=True)
class Result:
    """A trial's result. `outcome`: killed, timed out (counts as killed), survived, or invalid (no trial)."""

    mutant: Mutant
    outcome: str
    seconds: float
    output: str = ""

    @property
    def is_killed(self) -> bool:
        return self.outcome in ("killed", "timed out")


@dataclass(frozen=True)
class Ended:
    code: int | None  # None: the tests hung
    seconds: float
    output: str


class Laboratory:
    """The folder of one worker, which tries one mutant after another."""

    def __init__(self, build: Build, folder: Path) -> None:
        self._build = build
        self._folder = folder
        self._overlay = Overlay(folder)
        is_usual = build.folder == ROOT / "build" / "core"
        self._settings = {} if is_usual else {"CORE_TESTS": str(build.folder)}

    def run_unmutated(self, mutant: Mutant) -> Ended:
        return self._run(mutant, self._build.folder, limit=600.0)

    def run(self, mutant: Mutant, normal_seconds: float) -> Result:
        """Tries a mutant; `normal_seconds` is the duration of its tests without it."""
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            try:
                programs = self._put(mutant, folder)
                ended = self._run(mutant, programs, BASE_LIMIT + LIMIT_FACTOR * normal_seconds)
            except (BuildError, TableError) as error:
                return Result(mutant, "invalid", time.monotonic() - begin, str(error))
            finally:
                self._overlay.restore(mutant.file)
        outcome = "timed out" if ended.code is None else "killed" if ended.code else "survived"
        if ended.code in _PYTEST_MISUSED and not mutant.program:
            outcome = "invalid"
        return Result(mutant, outcome, time.monotonic() - begin, ended.output)

    def _put(self, mutant: Mutant, folder: Path) -> Path:
        """Makes the mutant; returns the folder with the programs of the core's tests."""
        text = mutant.mutated()
        if mutant.program:
            self._build.make(mutant.program, mutant.file, text, folder)
            return folder
        if not mutant.is_native:
            self._overlay.put(mutant.file, text)
        elif mutant.file.startswith("bindings/tensorflow/"):
            self._overlay.put_library(self._build.make_for_tensorflow(mutant.file, text, folder))
        else:
            self._overlay.put_library(self._build.make(LIBRARY, mutant.file, text, folder))
        return self._build.folder

    def _run(self, mutant: Mutant, programs: Path, limit: float) -> Ended:
        if mutant.program:
            command = [str(programs / mutant.program), mutant.case]
        else:
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            command = [str(self._overlay.python), "-m", "pytest", *options, *mutant.selection]
        with tempfile.TemporaryDirectory(prefix="m") as folder:
            return _run(command, Path(folder), limit, self._settings)


def _run(command: list[str], folder: Path, limit: float, settings: dict[str, str]) -> Ended:
    """Runs a command whose temporary files lie in `folder`, and ends all processes that it leaves behind."""
    mark = uuid.uuid4().hex
    foreign = ("PYTEST_", "SIRTAKI_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {
        _MARK: mark,
        "TMPDIR": str(folder),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "examples"),
    }
    begin = time.monotonic()
    with open(folder / "output", "w+b") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        _end_processes(mark)
        process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Ended(code, time.monotonic() - begin, text)


def _end_processes(mark: str) -> None:
    """Ends all processes that a trial has left: a mutant may have broken the code that ends ranks."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == os.getuid() and process.environ().get(_MARK) == mark:
                process.send_signal(signal.SIGKILL)
