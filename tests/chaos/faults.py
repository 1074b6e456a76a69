"""Faults of a trial: the failure, its process, and the required end of the job.

A rank's own faults occur at a random step of its program, those of the launcher's processes at a random
moment.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The permitted ends of a job: its exit codes, and whether hvdrun must name the rank of the fault."""

    codes: frozenset[int]
    names_rank: bool = True


def _kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise() -> None:
    raise KeyError("label 7")


def _exit(code: int) -> Callable[[], None]:
    return lambda: sys.exit(code)


def _vanish() -> None:
    os._exit(0)


def _pause() -> None:
    time.sleep(1.5)  # longer than the stall report, shorter than its deadline


def _close_descriptors() -> None:
    """Closes all descriptors of this process but its standard streams, like a script with a faulty loop."""
    os.closerange(3, 64)


def _limit(which: int, amount: Callable[[], int]) -> Callable[[], None]:
    def set_limit() -> None:
        _, hard = resource.getrlimit(which)
        resource.setrlimit(which, (amount(), hard))

    return set_limit


def _address_space() -> int:
    """Returns a little more than this process' current use of address space, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + (1 << 20)


WELL = Outcome(frozenset({0}), names_rank=False)
FAILS = frozenset(range(1, 256))

# Faults inside the victim's program.
IN_A_RANK: dict[str, tuple[Callable[[], None], Outcome]] = {
    "SIGKILL": (_kill(signal.SIGKILL), Outcome(frozenset({128 + signal.SIGKILL}))),
    "SIGSEGV": (_kill(signal.SIGSEGV), Outcome(frozenset({128 + signal.SIGSEGV}))),
    "SIGABRT": (_kill(signal.SIGABRT), Outcome(frozenset({128 + signal.SIGABRT}))),
    "SIGSTOP": (_kill(signal.SIGSTOP), Outcome(FAILS)),
    "exception": (_raise, Outcome(frozenset({1}))),
    "exit 3": (_exit(3), Outcome(frozenset({3}))),
    "vanishes": (_vanish, Outcome(FAILS)),
    "late": (_pause, WELL),
    "no descriptors": (_limit(resource.RLIMIT_NOFILE, lambda: 3), Outcome(FAILS | {0})),
    "no file size": (_limit(resource.RLIMIT_FSIZE, lambda: 0), Outcome(FAILS | {0})),
    "no memory": (_limit(resource.RLIMIT_AS, _address_space), Outcome(FAILS | {0})),
    "descriptors closed": (_close_descriptors, Outcome(FAILS | {0})),
}

# Faults of a process of the launcher, caused from outside: (process, signal).
OUTSIDE: dict[str, tuple[str, int, Outcome]] = {
    "kill hvdrun": ("hvdrun", signal.SIGKILL, Outcome(frozenset({-signal.SIGKILL}), names_rank=False)),
    "SIGTERM hvdrun": (
        "hvdrun",
        signal.SIGTERM,
        Outcome(frozenset({128 + signal.SIGTERM}), names_rank=False),
    ),
    "SIGINT hvdrun": ("hvdrun", signal.SIGINT, Outcome(frozenset({128 + signal.SIGINT}), names_rank=False)),
    "kill reaper": ("reaper.py", signal.SIGKILL, WELL),
    "stop and continue": ("rank", signal.SIGSTOP, WELL),
    "kill agent": ("sirtaki.runner.hosts.agent", signal.SIGKILL, Outcome(FAILS, names_rank=False)),
    "kill ssh": ("ssh_stand_in.py", signal.SIGKILL, Outcome(FAILS, names_rank=False)),
}
ONLY_WITH_HOSTS = ("kill agent", "kill ssh")
NONE = "none"
EXACT = Outcome(frozenset({0}), names_rank=False)


def outcome_of(fault: str) -> Outcome:
    """Returns the required end of a job with this fault."""
    if fault in IN_A_RANK:
        return IN_A_RANK[fault][1]
    return OUTSIDE[fault][2] if fault in OUTSIDE else EXACT
