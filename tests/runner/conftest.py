"""Fixtures that run hvdrun as a user does: as a process of its own, whose ranks are real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, HVDRUN, RANK_SCRIPT, default_signals, script_writer


@pytest.fixture(autouse=True, scope="package")
def heeded_signals() -> Iterator[None]:
    """Sets default handlers: hvdrun respects nohup and background jobs, which tests must not inherit."""
    with default_signals():
        yield


@pytest.fixture
def environment() -> dict[str, str]:
    """Returns the environment of these tests without the variables of an outer job or shell."""
    foreign = ("SIRTAKI_", "HOROVOD_", "OMP_", "MKL_", "OPENBLAS_", "VIRTUAL_ENV", "CONDA_PREFIX")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


@pytest.fixture
def rank_script(tmp_path: Path) -> Callable[[str], str]:
    """Returns a function that writes a script for the ranks and returns its path."""
    return script_writer(tmp_path / "rank_script.py", RANK_SCRIPT)


@pytest.fixture
def hvdrun(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs hvdrun with standard input from /dev/null, and returns its output."""

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        defaults: dict[str, object] = {
            "env": environment,
            "stdin": subprocess.DEVNULL,
            "capture_output": True,
            "text": True,
            "timeout": FAILSAFE_SECONDS,
        }
        return subprocess.run([*HVDRUN, *arguments], **(defaults | options))

    return run


@pytest.fixture
def start_hvdrun(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Returns a function that starts hvdrun; ends everything that still runs after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
        defaults: dict[str, object] = {
            "env": environment,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        process = subprocess.Popen([*HVDRUN, *arguments], **(defaults | options))
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate(timeout=FAILSAFE_SECONDS)


@pytest.fixture
def hosts(tmp_path: Path, environment: dict[str, str]) -> Callable[..., Path]:
    """Puts a stand-in for ssh on the PATH (`ssh_stand_in.py` describes the behaviour of each host).

    Returns the folder with the hosts' home folders, named after the hosts.
    """
    folder = tmp_path / "hosts"
    (folder / "bin").mkdir(parents=True)
    stand_in = folder / "bin" / "ssh"
    stand_in.write_text(
        f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("ssh_stand_in.py")} "$@"\n'
    )
    stand_in.chmod(0o755)
    environment["PATH"] = f"{folder / 'bin'}:{environment.get('PATH', os.defpath)}"
    environment["SSH_STAND_IN"] = str(folder / "hosts.json")

    def write(**behaviours: object) -> Path:
        (folder / "hosts.json").write_text(json.dumps(behaviours))
        return folder

    return write
