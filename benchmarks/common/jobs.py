"""Jobs of ranks that wait for orders: so jobs of several launchers can take turns, one block at a time.

Each rank connects to a Unix socket in a folder that only this user may enter. Orders and answers are lines
of JSON. While it waits, a rank sleeps in the kernel and costs the other job nothing.
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
    """The start of a command that runs ranks with hvdrun."""
    return [sys.executable, "-m", "sirtaki.runner", "-np", str(size)]


def mpirun(size: int) -> list[str] | None:
    """The same with Open MPI: the system's, else that of PyPI beside this Python. None without both, or
    mpi4py.
    """
    beside = Path(sys.executable).with_name("mpirun")
    path = shutil.which("mpirun", path="/usr/bin:/usr/local/bin") or (
        str(beside) if beside.exists() else None
    )
    if path is None or importlib.util.find_spec("mpi4py") is None:
        return None
    return [path, "--allow-run-as-root", "--oversubscribe", "-np", str(size)]


def environment() -> dict[str, str]:
    """Makes the workers find the benchmarks, and gives each rank one thread, whoever launches it."""
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class Job:
    """Ranks of one worker module. Use it as a context manager: it ends the ranks."""

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
        """Gives all ranks an order and returns their answers, by rank."""
        line = json.dumps({"order": order, "arguments": arguments}) + "\n"
        for stream in self._ranks:
            stream.write(line.encode())
            stream.flush()
        answers = [stream.readline() for stream in self._ranks]
        if not all(answers):
            raise SystemExit(f"a rank of {self._worker} ended during the order '{order}'")
        return [json.loads(answer) for answer in answers]

    def close(self) -> None:
        """Lets the ranks end."""
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
        connection.close()  # the stream keeps it open
        self._ranks[json.loads(stream.readline())["rank"]] = stream


def _accept(listener: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    """The next rank's connection. Looks now and then whether the launcher has given up."""
    listener.settimeout(1)
    for _ in range(START_SECONDS):
        try:
            return listener.accept()[0]
        except TimeoutError:
            if process.poll() is not None:
                break
    raise SystemExit(f"not all ranks have come; their launcher ended with {process.poll()}")


def bind(rank: int, size: int) -> None:
    """Gives the calling thread a core of its own if there are enough, as mpirun does with its ranks.

    Else it is chance whether two ranks that wake each other end up on one core. Call it once sirtaki and gloo
    have started their threads: those may run anywhere.
    """
    cores = sorted(os.sched_getaffinity(0))
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def serve(path: str, rank: int, orders: Mapping[str, Callable[..., Any]]) -> None:
    """Obeys the orders that come, in a rank, until there are no more."""
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
