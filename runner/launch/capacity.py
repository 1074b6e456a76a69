"""The cores, GPUs and memory of this host; whether its ranks have room, before and during the start.

A machine without swap that runs out of memory freezes for minutes before the kernel kills a process, because
every program's code is read from disk again and again. A start that uses up the memory is therefore aborted
early.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sirtaki.runner.launch.errors import LaunchError

RANKS_PER_CORE = 16  # more is nearly always a typo in -np; Open MPI requires an option above one per core
_MEBIBYTE = 1 << 20
_BYTES_PER_RANK = 32 * _MEBIBYTE  # private memory of Python with only numpy and sirtaki
_RESERVE_SHARE, _MIN_RESERVE = 50, 192 * _MEBIBYTE  # a 50th of the memory: for code that is in use
_POLL_SECONDS = 0.2
_ADVICE = "start fewer ranks with -np"


def usable_cores() -> int:
    """Returns the number of cores that affinity and control groups leave to this process, at least 1."""
    from sirtaki.bindings import library  # imported late, because the host has to report its version first

    return library.usable_cores()


def count_gpus(root: Path = Path("/")) -> int:
    """Returns the number of NVIDIA GPUs on this host."""
    return sum(1 for device in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", device.name))


@dataclass(frozen=True)
class Memory:
    """Bytes that this process and its children may use in total, and bytes that are still available."""

    total: int
    available: int


def read_memory(root: Path = Path("/")) -> Memory:
    """Returns the memory of this host or of the enclosing control group (version 2) with the least available.

    Pages of files that can be dropped count as available. `root` is the parent of proc and sys.
    """
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    found = [Memory(fields["MemTotal"], fields["MemAvailable"])]
    for group in control_groups(root):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no limit ("max"), as at the top
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            droppable = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            found.append(Memory(limit, max(limit - used + int(droppable["inactive_file"]), 0)))
    return min(found, key=lambda memory: memory.available)


def control_groups(root: Path) -> Iterator[Path]:
    """Yields this process's control group (version 2) and its ancestors; the limits of all of them apply."""
    top = root / "sys/fs/cgroup"
    try:
        path = (root / "proc/self/cgroup").read_text().partition("0::")[2].partition("\n")[0].lstrip("/")
    except OSError:  # no version 2
        return
    for group in (top / path, *(top / path).parents):
        if not group.is_relative_to(top):
            break
        yield group


class Capacity:
    """Capacity for so many ranks, and servers of tables, on a host with `cores` usable cores."""

    def __init__(
        self, ranks: int, cores: int, read: Callable[[], Memory] = read_memory, servers: int = 0
    ) -> None:
        self._ranks = ranks
        self._count = ranks + servers
        self._subject = f"{self._count} ranks" + " and servers" * bool(servers)
        self._cores = cores
        self._read = read
        self._missing: set[int] = set()
        self.due: float | None = None  # when to check next (time.monotonic())
        self._until = 0.0

    def check(self) -> None:
        """Rejects a start that cannot succeed. Raises LaunchError with the remedy."""
        if self._count > RANKS_PER_CORE * self._cores:
            cores = "1 usable core" if self._cores == 1 else f"{self._cores} usable cores"
            raise LaunchError(
                f"{self._subject} on {cores} are more than {RANKS_PER_CORE} per core: {_ADVICE}, or use "
                "--oversubscribe if this is intended"
            )
        memory = self._read()
        if self._count * _BYTES_PER_RANK > memory.available:
            raise LaunchError(
                f"{self._subject} need at least {_size(self._count * _BYTES_PER_RANK)} of memory for "
                f"Python alone, but only {_size(memory.available)} are available here: {_ADVICE}, or use "
                "--oversubscribe to try anyway"
            )

    def shortage(self, started: int) -> str:
        """Returns why the start has to be aborted after `started` ranks; "" if there is enough memory."""
        memory = self._read()
        reserve = max(memory.total // _RESERVE_SHARE, _MIN_RESERVE)
        if memory.available >= reserve or memory.total < 2 * reserve:
            return ""
        return (
            f"starting {self._subject} uses up the memory of this host: only {_size(memory.available)} "
            f"of {_size(memory.total)} are left with {started} of them running: {_ADVICE}"
        )

    def watch(self, seconds: float) -> None:
        """Starts checking the memory, until all ranks have initialised or this time has passed."""
        self._missing = set(range(self._ranks))
        self._until = time.monotonic() + seconds
        self.due = time.monotonic()

    def note_initialised(self, rank: int) -> None:
        self._missing.discard(rank)
        if not self._missing:
            self.due = None

    def poll(self, now: float) -> str:
        """Checks the memory if it is time to; returns why the job has to be aborted, else ""."""
        if self.due is None or now < self.due:
            return ""
        self.due = now + _POLL_SECONDS if now < self._until else None
        return self.shortage(self._count)


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count // _MEBIBYTE} MiB"
