"""The reaper: a process that outlives hvdrun, however hvdrun ends, and then ends what hvdrun has started.

It runs this very file in a session of its own, with all signals blocked, and reads orders from a pipe whose
other end hvdrun, or its agent on another host, holds. When that end closes, the reaper kills the registered
process groups and removes the registered directories. A rank registers its own group before it becomes the
user's program, so there is no moment without protection. The reaper also kills the groups when the lease of
an agent ends, because the agent may be stopped, or wait for a file system that does not answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence

GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
# Orders: a group to end, one that has ended since, a directory to remove, when to kill the groups at once.
_GROUP, _ENDED, _DIRECTORY, _LEASE = "group ", "ended ", "directory ", "lease "
# Seconds, while there is a lease: sleeping does not count the time of a suspended machine.
_LONGEST_SLEEP = 1.0
_READ_BYTES = 64 * 1024
_POLL_SECONDS = 0.02  # no event announces that a process group has become empty


class Reaper:
    """hvdrun's side of the reaper: starts it, sends its orders, and replaces it if it is killed."""

    def __init__(self) -> None:
        self._groups: list[int] = []
        self._directories: list[str] = []
        self._locks: list[int] = []
        self._lease_end = math.inf
        self._released = False
        self._was_killed = False
        self._start()

    def _start(self) -> None:
        orders, self._pipe = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        known = [_GROUP + str(group) for group in self._groups]
        known += [_DIRECTORY + path for path in self._directories]
        known.append(_LEASE + repr(self._lease_end))
        self.pid = os.posix_spawn(
            sys.executable,
            # Known orders are passed as arguments: hvdrun may be killed before it can write to the pipe.
            [sys.executable, "-I", "-S", __file__, *known],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, orders, 0),
                (os.POSIX_SPAWN_DUP2, null, 1),
                (os.POSIX_SPAWN_DUP2, null, 2),
            ],
            setsigmask=signal.valid_signals(),
        )
        os.close(orders)
        os.close(null)

    def watch_group(self, group: int) -> None:
        """Registers a process group that the reaper will end. Called by the group's first process itself."""
        self._send_order(_GROUP + str(group))

    def note_group(self, group: int) -> None:
        """Remembers a group that its first process has registered with the reaper."""
        self._groups.append(group)

    def forget_group(self, group: int) -> None:
        """Forgets a group that has ended: its number may be used again."""
        with contextlib.suppress(ValueError):
            self._groups.remove(group)
        if not self._released:  # it has its orders, and ends what is left of them
            self._send_order(_ENDED + str(group))

    def kill_at(self, lease_end: float) -> None:
        """Orders the reaper to kill all groups at this time of `lease_clock`; a later order replaces it."""
        if lease_end != self._lease_end and not self._released:
            self._lease_end = lease_end
            self._send_order(_LEASE + repr(lease_end))

    def watch_directory(self, path: str) -> None:
        """Registers a directory that the reaper will remove with its contents."""
        self._directories.append(path)
        self._send_order(_DIRECTORY + path)

    def lock_directory(self, path: str) -> None:
        """Locks a registered directory until it is removed. Raises OSError.

        systemd-tmpfiles skips a locked directory (https://systemd.io/TEMPORARY_DIRECTORIES).
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self._locks.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)

    def replace_if_killed(self) -> bool:
        """Starts a new reaper with the same orders if this reaper has died; returns whether it had."""
        if self._released or not self.ended():
            return False
        os.close(self._pipe)
        self._start()
        return True

    def ended(self, options: int = os.WNOHANG) -> bool:
        """Returns whether the reaper has exited."""
        if self.pid:
            ended, status = os.waitpid(self.pid, options)
            if ended:
                self.pid, self._was_killed = 0, status != 0
        return not self.pid

    def release(self) -> None:
        """Starts the reaper's work; the reaper exits afterwards."""
        if not self._released:
            self._released = True
            os.close(self._pipe)

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for the reaper, and completes its work in case it was killed."""
        self.release()
        self.ended(options=0)
        if self._was_killed:
            end_groups(self._groups)
        for path in self._directories:
            remove_directory(path)
        for descriptor in self._locks:
            os.close(descriptor)

    def _send_order(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed; its replacement gets all orders
            os.write(self._pipe, os.fsencode(text) + b"\n")


def main() -> None:
    os.setsid()
    os.chdir("/")
    orders = _Orders(sys.argv[1:])
    while orders.receive():
        if orders.lease_end <= _now():
            orders.lease_end = math.inf
            _kill(groups_in(orders.others))
    end_groups(groups_in(orders.others))
    for order in orders.others:
        if order.startswith(_DIRECTORY):
            remove_directory(order.removeprefix(_DIRECTORY))


class _Orders:
    """The orders that the reaper has received."""

    def __init__(self, first: Sequence[str]) -> None:
        self.lease_end = math.inf  # time of `_now`
        self.others: list[str] = []
        self._partial = b""
        for order in first:
            self._take(order)

    def receive(self) -> bool:
        """Waits for orders, or for the end of the lease; returns False once the last writer is gone."""
        left = self.lease_end - _now()
        limit = None if left == math.inf else min(max(left, 0.0), _LONGEST_SLEEP)
        if not select.select([0], [], [], limit)[0]:
            return True
        data = os.read(0, _READ_BYTES)
        *whole, self._partial = (self._partial + data).split(b"\n")
        for order in whole:
            self._take(os.fsdecode(order))
        return bool(data)

    def _take(self, order: str) -> None:
        if order.startswith(_LEASE):
            self.lease_end = float(order.removeprefix(_LEASE))
        else:
            self.others.append(order)


def _now() -> float:
    """Returns the time as `lease_clock` does: this file runs by itself, and imports nothing of sirtaki."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def groups_in(orders: Sequence[str]) -> list[int]:
    """Returns the groups to end: a number that has been used again is in the orders again."""
    found: dict[str, None] = {}
    for order in orders:
        kind, _, number = order.partition(" ")
        if f"{kind} " == _GROUP:
            found[number] = None
        elif f"{kind} " == _ENDED:
            found.pop(number, None)
    return [int(number) for number in found]


def end_groups(groups: Sequence[int]) -> None:
    """Ends all processes of these groups: SIGTERM, then SIGKILL for processes that remain."""
    deadline = time.monotonic() + GRACE_SECONDS
    alive = {group for group in groups if _signal(group, signal.SIGTERM)}
    for group in alive:
        _signal(group, signal.SIGCONT)  # a stopped process does not handle signals
    while (alive := _with_members(alive)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _kill(alive)


def _kill(groups: Iterable[int]) -> None:
    for group in groups:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Sends a signal to a group; returns whether any process was there to receive it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _with_members(groups: set[int]) -> set[int]:
    """Returns the groups in which a process still runs.

    A zombie does not count: in a container without an init process it remains for ever.
    """
    found = set()
    for entry in os.listdir("/proc") if groups else ():
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, _, group = file.read().rpartition(b")")[2].split()[:3]
            except OSError:  # the process has just ended
                continue
            if state not in b"ZX" and int(group) in groups:
                found.add(int(group))
    return found


def remove_directory(path: str) -> None:
    """Removes a directory and its contents, the job's key first. Follows no links."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, "key"))
    shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
