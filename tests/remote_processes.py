"""Shared helpers of tests that end jobs: ranks with children, and what is left of them on all hosts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from launching import FAILSAFE_SECONDS, is_running, wait_until

# A rank that reports its pid, starts a grandchild in its group, and then works for a long time.
FAMILY = """
import subprocess
folder = os.path.dirname(__file__)
child = subprocess.Popen(["sleep", "300"])
def note(name, pid):
    with open(f"{folder}/{name}.pid", "w") as file: print(pid, file=file)
note(f"child{rank}", child.pid)
note(f"rank{rank}", os.getpid())
"""
LONG = FAMILY + "time.sleep(300)"


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Returns hvdrun's exit code and its standard error."""
    _, stderr = process.communicate(timeout=FAILSAFE_SECONDS)
    return process.returncode, stderr.decode()


def all_processes() -> Iterator[tuple[int, bytes]]:
    """Returns every process but this one, with its arguments."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes()
            except OSError:
                continue


def agents_of(homes: Path) -> list[int]:
    """Returns the agents of the hosts with these home folders."""
    found = []
    for pid, arguments in all_processes():
        if b"sirtaki.runner.hosts.agent" in arguments and b"-T" not in arguments.split(b"\0"):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if os.fsencode(homes) in environment and not arguments.startswith(b"/bin/sh"):
                found.append(pid)
    return found


def state_of(pid: int) -> str:
    """Returns the letter that ps shows for a process: "T" if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_their_end(pids: list[int]) -> None:
    wait_until(lambda: not any(is_running(pid) for pid in pids), "all processes have ended")


def wait_until_nothing_is_left(pids: list[int], homes: Path) -> None:
    wait_for_their_end(pids)
    wait_until(lambda: not agents_of(homes), "all agents have ended")
    wait_until(lambda: not list(homes.glob("*/sirtaki-*")), "the keys have been removed")
