"""Fixtures that run hvdrun as a user does: as a process of its own, whose ranks are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from auto_jobs import SPLITTING_PART
from launching import (
    FAILSAFE_SECONDS,
    HVDRUN,
    RANK_SCRIPT,
    default_signals,
    pickled_by_value,
    script_writer,
    stand_in_for_srun,
    stand_in_for_ssh,
)


@pytest.fixture(autouse=True, scope="package")
def heeded_signals() -> Iterator[None]:
    """Sets default handlers: hvdrun respects nohup and background jobs, which tests must not inherit."""
    with default_signals():
        yield


@pytest.fixture
def functions_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets functions and classes of the test's file travel to ranks, which cannot import that file."""
    with pickled_by_value(request.module.__name__):
        yield


@pytest.fixture
def environment() -> dict[str, str]:
    """Returns the environment of these tests without the variables of an outer job or shell."""
    foreign = ("SIRTAKI_", "HOROVOD_", "OMP_", "MKL_", "OPENBLAS_", "VIRTUAL_ENV", "CONDA_PREFIX")
    foreign += ("PYTHONBREAKPOINT",)  # Ray sets it in a process that starts it
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
def sirtaki(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs a command of `sirtaki`, with more variables, and returns its output."""

    def run(
        *arguments: object, prefix: tuple[str, ...] = (), **more: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, sys.executable, "-m", "sirtaki", *map(str, arguments)],
            env={**environment, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FAILSAFE_SECONDS,
        )

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
    return stand_in_for_ssh(tmp_path / "hosts", environment)


@pytest.fixture
def nodes(tmp_path: Path, environment: dict[str, str]) -> Callable[..., Path]:
    """Makes the environment that of a batch script on node1, with a stand-in for srun on the PATH.

    `srun_stand_in.py` describes the behaviour of the other nodes.
    """
    return stand_in_for_srun(tmp_path / "nodes", environment)


@dataclass(frozen=True)
class Place:
    """The host of rank 1 in a job of two ranks."""

    options: tuple[str, ...]
    on: str  # what a message says of it, as a part of a regular expression


@pytest.fixture(params=["here", "ssh", "srun"])
def place(request: pytest.FixtureRequest, hosts: Callable[..., Path], nodes: Callable[..., Path]) -> Place:
    """Runs the test with rank 1 here, and on another host."""
    if request.param == "here":
        return Place(("-np", "2"), "")
    if request.param == "ssh":
        hosts(hostB={})
        return Place(("-H", "localhost:1,hostB:1"), " on hostB")
    nodes(node2={})
    return Place(("--launcher", "srun", "-H", "localhost:1,node2:1"), " on node2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder for scripts, in which `import keras` means an empty module."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "sitecustomize.py").write_text(SPLITTING_PART)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "keras.py").write_text("")
    return tmp_path / "work"


@pytest.fixture
def auto(
    hvdrun: Callable[..., subprocess.CompletedProcess[str]], folder: Path, environment: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs a command of two ranks with --auto in that folder."""
    path = os.pathsep.join(filter(None, (str(folder.parent / "parts"), environment.get("PYTHONPATH"))))

    def run(*command: str, ranks: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**environment, "PYTHONPATH": path, **variables}
        return hvdrun("--auto", "-np", str(ranks), *command, cwd=folder, env=env)

    return run
