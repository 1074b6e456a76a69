"""Jobs whose ranks wait for orders, so that jobs of several launchers can take turns, one block at a time.

Each rank connects to a Unix socket in a folder that only this user can enter. Orders and answers are lines
of JSON. While it waits, a rank sleeps in the kernel and does not slow the other job down.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.measure import alternate
from common.native import BENCHMARKS

START_SECONDS = 300  # DeepSpeed may have to be compiled
ANSWER_SECONDS = 300
END_SECONDS = 20
ROUNDS_PER_ORDER = 5
MOST_DEVIATION = 1e-2  # of the weights of copies that train alike, relative to the largest weight
# glibc keeps freed memory in the process, up to its largest threshold of 32 MiB. By default it gives large
# gradients back to the system, and the order then decides which kind of step pays for new pages: 40 ms for
# 100 MB.
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


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
    """Returns the environment for any launcher: workers find the benchmarks, a rank has one thread."""
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def free_ports(count: int) -> list[int]:
    """Returns ports that are free at the moment, for peers that cannot choose their own."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def make_key(folder: Path) -> Path:
    """Returns a file with a new key, by which ranks authenticate each other."""
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    return key


def name_of(worker: type) -> str:
    """Returns MODULE:CLASS, by which ranks import a class, even that of the program itself."""
    module = Path(inspect.getfile(worker)).resolve().relative_to(BENCHMARKS).with_suffix("")
    return f"{'.'.join(module.parts)}:{worker.__name__}"


class Job(contextlib.AbstractContextManager["Job"]):
    """The ranks of one worker class. Used as a context manager, it ends the ranks."""

    def __init__(
        self,
        launcher: Sequence[str],
        size: int,
        worker: type | str,
        *arguments: str,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`worker`: the class, or MODULE:CLASS. `settings` are added to the ranks' environment."""
        self._folder = tempfile.TemporaryDirectory(prefix="sirtaki-benchmark-")
        path = os.path.join(self._folder.name, "orders")
        self._ranks: list[Any] = [None] * size
        self._worker = worker if isinstance(worker, str) else name_of(worker)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(size)
            listener.settimeout(START_SECONDS)
            command = [*launcher, sys.executable, "-m", "common.serving", self._worker, path, *arguments]
            surroundings = {**environment(), **(settings or {})}
            self._process = subprocess.Popen(command, env=surroundings, stdin=subprocess.DEVNULL)
            try:
                for _ in range(size):
                    self._welcome(listener)
            except BaseException:
                self.close()
                raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_id(self) -> int:
        """Returns the launcher's process number."""
        return self._process.pid

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return len(self._ranks)

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

    def slowest(self, order: str, **arguments: Any) -> list[float]:
        """Returns the latency of each call that an order measures: that of its slowest rank."""
        return [max(times) for times in zip(*self.ask(order, **arguments), strict=True)]

    def blocks(self, names: Sequence[str], rounds: int, calls: int) -> dict[str, list[list[float]]]:
        """Returns the latencies of each implementation's blocks of calls, which take turns."""
        return alternate({who: partial(self.slowest, "block", who=who, calls=calls) for who in names}, rounds)

    def rounds(self, count: int, combine: Callable[[Iterable[float]], float] = max) -> dict[str, list[float]]:
        """Has the ranks run rounds of steps, a few at a time.

        Returns the times of each kind of step, combined over the ranks.
        """
        times: dict[str, list[float]] = {}
        for _ in range(0, count, ROUNDS_PER_ORDER):
            ranks = self.ask("rounds", count=ROUNDS_PER_ORDER)
            for name in ranks[0]:
                steps = zip(*(rank[name] for rank in ranks), strict=True)
                times.setdefault(name, []).extend(map(combine, steps))
        return times

    def deviation(self, model: str, **arguments: Any) -> float:
        """Returns how far the copies of a model have diverged; fails if they have really."""
        deviation = max(self.ask("deviation", **arguments))
        if not deviation < MOST_DEVIATION:
            raise SystemExit(f"{model}: the weights of the exchanging copies differ by {deviation:.2g}")
        return deviation

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
