"""Ranks of a launcher that serves PMI-1, the simple process management interface.

Flux, MPICH's mpiexec, and launchers derived from it do
(https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_13.html).

The launcher leaves a descriptor in PMI_FD, over which processes exchange values line by line. Rank 0 writes
the key and the address of the rendezvous; no MPI library is involved.
"""

from __future__ import annotations

import atexit
import base64
import functools
import os
import secrets
import select
import time
from collections.abc import Mapping

from sirtaki.bindings.bootstrap.job import KEY_BYTES, Job, RendezvousError
from sirtaki.bindings.bootstrap.providers.world import VERSION, World, key_of, number_in, start_timeout

DESCRIPTOR = "PMI_FD"
_LONGEST_LINE = 64 * 1024  # bytes; a launcher's own limits are about 1 KiB


def find(environment: Mapping[str, str]) -> World | None:
    """Returns the world of the launcher; None if it serves no PMI, or has started a single process."""
    if DESCRIPTOR not in environment or environment.get("PMI_SIZE", "1") == "1":
        return None
    rank, size = number_in(environment, "PMI_RANK"), number_in(environment, "PMI_SIZE")
    timeout = start_timeout(environment)
    channel = _Channel(_wire_of(number_in(environment, DESCRIPTOR)), rank, timeout)
    own = f"{secrets.token_hex(8)} {(key_of(environment) or secrets.token_bytes(KEY_BYTES)).hex()}"
    name, key = channel.broadcast("job", own).split()
    job = Job(f"pmi-{name}", size, bytes.fromhex(key), VERSION)

    def announce(address: str) -> str:
        return channel.broadcast("address", address)

    return World(rank, job, "*:0", timeout, serves=rank == 0, announce=announce)


class _Channel:
    """The values exchanged by a collective init(): rank 0 writes, the other ranks read."""

    def __init__(self, wire: _Wire, rank: int, seconds: float) -> None:
        self._wire, self._rank, self._seconds = wire, rank, seconds
        wire.turn += 1

    def broadcast(self, label: str, text: str) -> str:
        """Returns rank 0's text on every rank; all of them must call it. Raises RendezvousError."""
        wire, deadline, key = (
            self._wire,
            time.monotonic() + self._seconds,
            f"sirtaki-{self._wire.turn}-{label}",
        )
        if self._rank == 0:
            value = base64.urlsafe_b64encode(text.encode()).decode()
            pieces = [value[at : at + wire.longest_value] for at in range(0, len(value), wire.longest_value)]
            for index, piece in enumerate([str(len(pieces)), *pieces]):
                wire.ask(f"put kvsname={wire.space} key={key}-{index} value={piece}", "put_result", deadline)
        wire.ask("barrier_in", "barrier_out", deadline)
        if self._rank == 0:
            return text
        count = int(self._read(f"{key}-0", deadline))
        read = "".join(self._read(f"{key}-{index}", deadline) for index in range(1, count + 1))
        return base64.urlsafe_b64decode(read).decode()

    def _read(self, key: str, deadline: float) -> str:
        answer = self._wire.ask(f"get kvsname={self._wire.space} key={key}", "get_result", deadline)
        return answer.get("value", "")


@functools.lru_cache(maxsize=1)
def _wire_of(descriptor: int) -> _Wire:
    """Returns this process's wire, shared by all its init() calls: launchers allow a single conversation."""
    return _Wire(descriptor)


class _Wire:
    """A process's conversation with its launcher: a line per request, a line per answer.

    Attributes:
        turn: how many init() calls have used it.
        space: the launcher's name for the values of this job.
        longest_value: in characters.
    """

    def __init__(self, descriptor: int, seconds: float = 30.0) -> None:
        self._descriptor = descriptor
        self._received = b""
        self.turn = 0
        deadline = time.monotonic() + seconds
        self.ask("init pmi_version=1 pmi_subversion=1", "response_to_init", deadline)
        self._process = os.getpid()
        atexit.register(self._finish)
        self.space = self.ask("get_my_kvsname", "my_kvsname", deadline).get("kvsname", "")
        self.longest_value = int(self.ask("get_maxes", "maxes", deadline).get("vallen_max", "256")) - 1

    def ask(self, command: str, expected: str, deadline: float) -> dict[str, str]:
        """Returns the fields of the launcher's answer. Raises RendezvousError if it is none, or says no."""
        try:
            os.write(self._descriptor, f"cmd={command}\n".encode())
            line = self._read_line(deadline)
        except OSError as error:
            raise RendezvousError(f"the launcher's {DESCRIPTOR} cannot be used: {error.strerror}") from None
        if line is None:
            raise RendezvousError(
                "the other ranks have not called init() in time: the launcher that has started them has not "
                f"answered `{command.split()[0]}` of PMI (SIRTAKI_START_TIMEOUT sets the limit in seconds)"
            )
        answer = dict(field.partition("=")[::2] for field in line.split())
        if answer.get("cmd") != expected or answer.get("rc", "0") != "0":
            raise RendezvousError(f"the launcher has refused `{command.split()[0]}` of PMI: {line!r}")
        return answer

    def _read_line(self, deadline: float) -> str | None:
        """Returns the next line; None if it has not come in time."""
        while b"\n" not in self._received:
            left = max(deadline - time.monotonic(), 0.0)
            if not select.select([self._descriptor], [], [], left)[0]:
                return None
            data = os.read(self._descriptor, _LONGEST_LINE)
            self._received += data
            if not data or len(self._received) > _LONGEST_LINE:
                raise RendezvousError("the launcher has ended the conversation over PMI")
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace")

    def _finish(self) -> None:
        """Says goodbye: without it, a launcher takes the end of the process for a failure."""
        if os.getpid() == self._process:
            try:
                self.ask("finalize", "finalize_ack", time.monotonic() + 5.0)
            except RendezvousError:
                return
