"""A rank's connection to the launcher: the call comes over it, and the outcome goes back."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from typing import Any

from sirtaki.runner.environment import encrypts
from sirtaki.runner.function.call import python_version
from sirtaki.runner.function.service import END, HELLO, OFFSET, OUTCOME, PIECE, PIECE_BYTES, READ
from sirtaki.runner.rendezvous.job import CALLS, Identity, Job, RendezvousError
from sirtaki.runner.rendezvous.providers import find_world
from sirtaki.runner.rendezvous.rendezvous_client import RendezvousClient

_ANSWER_SECONDS = 600.0  # for an answer, which takes milliseconds unless the launcher was stopped


class LauncherGone(Exception):
    """The launcher has ended, or refuses what this process sends; so this process ends, too."""


class LauncherConnection:
    """The connection to the launcher. `number` is that of this rank, or worker of an elastic job, there."""

    def __init__(self) -> None:
        """Connects. Raises LauncherGone if there is no launcher, or if it does not accept this process."""
        try:
            address, job, self.number, start_timeout = _find_launcher()
            mine = Identity(self.number, channel=CALLS)
            self._client = RendezvousClient.connect(address, job, mine, start_timeout)
            self._client.keep_alive()  # the function may run for days
        except RendezvousError as error:
            raise LauncherGone(str(error)) from None
        values = {"host": socket.gethostname(), "pid": os.getpid(), "python": python_version()}
        answer = json.loads(self._ask(HELLO + json.dumps(values).encode()))
        self.path: list[str] = answer["path"]
        self._size: int = answer["size"]
        self._pending = bytearray()  # bytes of the outcome that have not been sent

    def read_call(self) -> bytearray:
        """Returns the pickled call."""
        call, end = bytearray(self._size), 0
        while end < self._size:
            piece = self._ask(READ + OFFSET.pack(end))
            call[end : end + len(piece)] = piece
            end += len(piece)
        return call

    def begin_outcome(self, report: dict[str, Any]) -> None:
        """Begins the outcome; one that has not ended is forgotten."""
        self._pending.clear()
        self._ask(OUTCOME + json.dumps(report).encode())

    def write(self, data: Any) -> int:
        """Sends a part of the pickled outcome, as a file that `pickle` writes to."""
        view = memoryview(data).cast("B")
        if len(self._pending) + len(view) > PIECE_BYTES:
            self._send_pending()
        if len(view) <= PIECE_BYTES:
            self._pending += view
            return len(view)
        for start in range(0, len(view), PIECE_BYTES):
            self._ask(b"".join((PIECE, view[start : start + PIECE_BYTES])))
        return len(view)

    def end_outcome(self) -> None:
        """Returns when the launcher has the whole outcome."""
        self._send_pending()
        self._ask(END)

    def _send_pending(self) -> None:
        if self._pending:
            self._ask(PIECE + bytes(self._pending))
            self._pending.clear()

    def _ask(self, request: bytes) -> bytes:
        try:
            return self._client.call(request, time.monotonic() + _ANSWER_SECONDS)
        except (OSError, RendezvousError) as error:
            raise LauncherGone(str(error)) from None


def _find_launcher() -> tuple[str, Job, int, float]:
    """Returns the address of the launcher, the job, this process's number there, and the start timeout."""
    world = find_world()
    address, job, number = world.address, world.job, world.rank
    if "SIRTAKI_ARBITER" in os.environ:
        from sirtaki.runner.rendezvous.elastic.process import ARBITER, WORKERS
        from sirtaki.runner.rendezvous.lifecycle import WORKER

        address, number = os.environ[ARBITER], int(os.environ[WORKER])
        job = replace(job, id=f"{job.id}.workers", size=WORKERS)
    if encrypts(os.environ):
        from sirtaki.runner.rendezvous.lifecycle import encrypted

        job = encrypted(job)
    return address, job, number, world.start_timeout
