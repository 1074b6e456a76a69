"""Jobs whose ranks wait for orders, so that jobs of several launchers can take turns, one block at a time.

Each rank connects to a Unix socket in a folder that only this user can enter. Orders and answers are lines
of JSON. While it waits, a rank sleeps in the kernel and does not slow the other job down.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.native import BENCHMARKS

START_SECONDS = 120
ANSWER_SECONDS = 300
END_SECONDS = 20


def hvdrun(size: int) -> list[str]:
    """Returns the start of a command that runs ranks with hvdrun."""
    return [sys.executable, "-m", "sirtaki.runner", "-np", str(size)]


def mpirun(size: int) -> list[str] | None:
    """Returns the start of a command that runs ranks with Open MPI: the system's, else PyPI's beside this
    Python. None without either, or without mpi4py.
    """
    beside = Path(sys.executable).with_name("mpirun")
    path = shutil.which("mpirun", path="/usr/bin:/usr/local/bin") or (
        str(beside) if beside.exists() else None
    )
    if path is None or importlib.util.find_spec("mpi4py") is None:
        return None
    return [path, "--allow-run-as-root", "--oversubscribe", "-np", str(size)]


def environment() -> dict[str, str]:
    """Returns the environment for any launcher: workers find the benchmarks, each rank has one thread."""
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class Job:
    """The ranks of one worker module. Used as a context manager, it ends the ranks."""

    def __init__(
        self,
        launcher: Sequence[str],
        size: int,
        worker: str,
        *arguments: str,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` are added to the ranks' environment."""
        self._folder = tempfile.TemporaryDirectory(prefix="sirtaki-benchmark-")
        path = os.path.join(self._folder.name, "orders")
        self._ranks: list[Any] = [None] * size
        self._worker = worker
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(size)
            listener.settimeout(START_SECONDS)
            command = [*launcher, sys.executable, "-m", worker, path, *arguments]
            surroundings = {**environment(), **(settings or {})}
            self._process = subprocess.Popen(command, env=surroundings, stdin=subprocess.DEVNULL)
            try:
                for _ in range(size):
                    self._welcome(listener)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, order: str, **arguments: Any) -> list[Any]:
        """Sends an order to all ranks and returns their answers, by rank."""
        line = json.dumps({"order": order, "arguments": arguments}) + "\n"
        for stream in self._ranks:
            stream.write(line.encode())
            stream.flush()
        answers = [stream.readline() for stream in self._ranks]
        if not all(answers):
            raise SystemExit(f"a rank of {self._worker} ended during the order '{order}'")
        return [json.loads(answer) for answer in answers]

    def close(self) -> None:
        """Ends the ranks."""
        for stream in filter(None, self._ranks):
            stream.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(END_SECONDS)
        self._folder.cleanup()

    def _welcome(self, listener: socket.socket) -> None:
        connection = _accept(listener, self._process)
        connection.settimeout(ANSWER_SECONDS)
        stream = connection.makefile("rwb")
        connection.close()  # the stream keeps the socket open
        self._ranks[json.loads(stream.readline())["rank"]] = stream


def _accept(listener: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    """Accepts the next rank's connection. Checks periodically whether the launcher has exited."""
    listener.settimeout(1)
    for _ in range(START_SECONDS):
        try:
            return listener.accept()[0]
        except TimeoutError:
            if process.poll() is not None:
                break
    raise SystemExit(f"not all ranks have come; their launcher ended with {process.poll()}")


def bind(rank: int, size: int) -> None:
    """Binds the calling thread to a core of its own if there are enough cores, as mpirun does for its ranks.

    Otherwise two ranks that wake each other may or may not share a core, by chance. Call it after sirtaki and
    gloo have started their threads, which may run on any core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def serve(path: str, rank: int, orders: Mapping[str, Callable[..., Any]]) -> None:
    """Executes the orders that a rank receives until the connection ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rwb")
        answer: Any = {"rank": rank}
        while True:
            stream.write((json.dumps(answer) + "\n").encode())
            stream.flush()
            line = stream.readline()
            if not line:
                return
            received = json.loads(line)
            answer = orders[received["order"]](**received["arguments"])
