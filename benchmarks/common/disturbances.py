"""Disturbances of a measurement: other work on the cores and the memory, and limits of the system.

Each is a context manager, entered before the ranks start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from common.options import MIB

QUOTA_CORES = 1.5
PERIOD_MICROSECONDS = 100_000
GROUPS = Path("/sys/fs/cgroup")
COUNTING = "while True: pass"
COPYING = f"""
import numpy
source = numpy.ones({256 * MIB // 8})
target = numpy.empty_like(source)
while True: numpy.copyto(target, source)
"""


class NotPossible(Exception):
    """The system does not allow the disturbance; the text names the reason."""


@dataclass(frozen=True)
class Disturbance:
    """One condition to measure under: the load beside the ranks, the number of ranks, their settings."""

    name: str
    what: str
    beside: Callable[[], AbstractContextManager[None]] = nullcontext
    ranks: int = 2
    settings: dict[str, str] = field(default_factory=dict)  # sirtaki's settings, passed in its environment


@contextmanager
def program(code: str, core: int | None = None) -> Iterator[None]:
    """Runs Python code during the context, on the given core if there is one."""
    binding = "" if core is None else f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    process = subprocess.Popen([sys.executable, "-c", binding + code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def busy_neighbour() -> AbstractContextManager[None]:
    """Runs a process that computes all the time on the first core."""
    return program(COUNTING, min(os.sched_getaffinity(0)))


def busy_memory() -> AbstractContextManager[None]:
    """Runs a process that copies 256 MiB in a loop, on any core."""
    return program(COPYING)


@contextmanager
def quota() -> Iterator[None]:
    """Limits processes that are started during the context to QUOTA_CORES cores, by a control group."""
    with ExitStack() as stack:
        try:
            group = _make_group()
            stack.callback(group.rmdir)
            _limit(group)
            before = _own_group(group)
            _enter(group)
        except OSError as error:
            raise NotPossible(f"no control group can be made here: {error}") from error
        stack.callback(_enter, before)  # leaves the group; children have ended, so it is empty then
        yield


def _make_group() -> Path:
    is_first_version = (GROUPS / "cpu" / "cpu.cfs_quota_us").exists() or not (
        GROUPS / "cgroup.controllers"
    ).exists()
    group = (GROUPS / "cpu" if is_first_version else GROUPS) / f"sirtaki-benchmark-{os.getpid()}"
    if not is_first_version:
        (GROUPS / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir()
    return group


def _limit(group: Path) -> None:
    microseconds = int(QUOTA_CORES * PERIOD_MICROSECONDS)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{microseconds} {PERIOD_MICROSECONDS}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (group / "cpu.cfs_quota_us").write_text(str(microseconds))


def _own_group(beside: Path) -> Path:
    """Returns this process's control group in the hierarchy of `beside`."""
    hierarchy = beside.parent
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (controllers == "" and hierarchy == GROUPS) or "cpu" in controllers.split(","):
            return hierarchy / path.lstrip("/")
    return hierarchy


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


DISTURBANCES = (
    Disturbance("none", "2 ranks, nothing else"),
    Disturbance("neighbour", "a busy neighbour on one core", busy_neighbour),
    Disturbance("memory", "another process copies memory", busy_memory),
    Disturbance("quota", f"a quota of {QUOTA_CORES} cores", quota),
    Disturbance("4 ranks", "4 ranks", ranks=4),
    Disturbance("8 ranks", "8 ranks", ranks=8),
    Disturbance("small chunks", "chunks of 64 KiB", settings={"SIRTAKI_CHUNK_BYTES": "64K"}),
    Disturbance("large chunks", "chunks of 2 MiB", settings={"SIRTAKI_CHUNK_BYTES": "2M"}),
    Disturbance("little polling", "spin 20 µs", settings={"SIRTAKI_SPIN": "0.00002"}),
    Disturbance("much polling", "spin 5 ms", settings={"SIRTAKI_SPIN": "0.005"}),
)
