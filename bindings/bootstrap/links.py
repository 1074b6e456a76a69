"""The links between the ranks of one host: a Unix socket to each, and descriptors passed over them.

Each rank listens on an abstract Unix socket of its own; it connects to the lower ranks and accepts the higher
ones, so nobody waits in a circle. Over each socket both sides pass what the other needs to reach them: their
doorbells, a descriptor of their process, and, from local rank 0, the shared memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..context import Config, Context, SharedMemory, check
from ..library import ffi, lib, text
from .handshake import BootstrapError, BootstrapTimeout, Identity, Job, LinkKind, Role, shake_hands

_HANDSHAKE_SECONDS = 10.0  # for one connection, so that a slow stranger does not use up the whole deadline
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Meeting:
    """What it takes to meet the other ranks: the job, who this is, and until when (time.monotonic())."""

    job: Job
    mine: Identity
    deadline: float

    def shake_hands(self, connection: socket.socket, role: Role, deadline: float) -> Identity:
        return shake_hands(connection, self.job, self.mine, LinkKind.RANKS, role, deadline)


class Listener:
    """This rank's own abstract Unix socket."""

    def __init__(self) -> None:
        self.name = f"sirtaki-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind("\0" + self.name)
        self._socket.listen(512)

    def accept(self, meeting: Meeting, wanted: set[int]) -> tuple[int, socket.socket]:
        """The next of the `wanted` ranks to connect. Strangers are turned away."""
        while True:
            left = meeting.deadline - time.monotonic()
            if left <= 0:
                raise BootstrapTimeout(f"no connection came from {_ranks(wanted)} in time")
            self._socket.settimeout(left)
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            rank = self._welcome(connection, meeting, wanted)
            if rank is not None:
                return rank, connection
            connection.close()

    def _welcome(self, connection: socket.socket, meeting: Meeting, wanted: set[int]) -> int | None:
        if not _is_ours(connection):
            return None
        deadline = min(meeting.deadline, time.monotonic() + _HANDSHAKE_SECONDS)
        try:
            peer = meeting.shake_hands(connection, Role.ACCEPTS, deadline)
        except (BootstrapError, OSError) as error:
            sys.stderr.write(f"sirtaki: {meeting.mine.name} refused a connection: {error}\n")
            return None
        return peer.rank if peer.rank in wanted and peer.generation == meeting.mine.generation else None

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other side runs as the same user, or as root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (os.getuid(), 0)


def _ranks(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def connect_all(listener: Listener, names: Sequence[str], meeting: Meeting) -> dict[int, socket.socket]:
    """A connected socket to every other rank; `names` are the listeners' names, by rank.

    Raises:
        BootstrapError: a rank is gone, or is not who it should be.
        BootstrapTimeout: a rank did not come in time.
    """
    sockets: dict[int, socket.socket] = {}
    try:
        for rank in range(meeting.mine.rank):
            sockets[rank] = _connect(rank, names[rank], meeting)
        wanted = set(range(meeting.mine.rank + 1, len(names)))
        while wanted:
            rank, connection = listener.accept(meeting, wanted)
            sockets[rank] = connection
            wanted.remove(rank)
    except BaseException:
        close_all(sockets)
        raise
    return sockets


def _connect(rank: int, name: str, meeting: Meeting) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect("\0" + name)
        if not _is_ours(connection):
            raise BootstrapError(f"another user's process answers where rank {rank} should be")
        peer = meeting.shake_hands(connection, Role.CONNECTS, meeting.deadline)
        if peer.rank != rank:
            raise BootstrapError(f"{peer.name} answers where rank {rank} should be")
    except OSError as error:
        connection.close()
        raise BootstrapError(f"rank {rank} is gone: it does not answer ({error.strerror or error})") from None
    except BaseException:
        connection.close()
        raise
    return connection


def close_all(sockets: dict[int, socket.socket]) -> None:
    for connection in sockets.values():
        connection.close()


@dataclass
class Descriptors:
    """What a rank gives to others of its host; -1 for what it has not."""

    engine: int = -1
    waiter: int = -1
    process: int = -1
    memory: int = -1

    def present(self) -> list[tuple[str, int]]:
        return [(name, number) for name, number in vars(self).items() if number >= 0]

    def close(self) -> None:
        for name, number in self.present():
            os.close(number)
            setattr(self, name, -1)

    def send(self, connection: socket.socket) -> None:
        present = self.present()
        names = " ".join(name for name, _ in present).encode()
        socket.send_fds(connection, [names.ljust(_NAMES_BYTES)], [number for _, number in present])


_NAMES_BYTES = 64
_NAMES = {"engine", "waiter", "process", "memory"}


def _receive(connection: socket.socket, rank: int, deadline: float) -> Descriptors:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        names, numbers, *_ = socket.recv_fds(connection, _NAMES_BYTES, len(_NAMES), socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise BootstrapTimeout(f"rank {rank} did not pass its descriptors in time") from None
    except OSError as error:
        raise BootstrapError(f"rank {rank} is gone: {error.strerror}") from None
    fields = names.decode("ascii", "replace").split()
    if len(fields) != len(numbers) or not set(fields) <= _NAMES or not {"engine", "waiter"} <= set(fields):
        for number in numbers:
            os.close(number)
        raise BootstrapError(f"rank {rank} is gone, or its descriptors could not be passed")
    return Descriptors(**dict(zip(fields, numbers, strict=True)))


def _create(make: Any, *arguments: Any) -> int:
    error = ffi.new("srt_error *")
    number = make(*arguments, error)
    if number < 0:
        check(error[0].status, error)
    return number


def create_memory(config: Config, slots: int) -> tuple[int, str]:
    """Memory to share among `slots` ranks: (descriptor, ""), or (-1, why there is none)."""
    error = ffi.new("srt_error *")
    number = lib.srt_memory_create(lib.srt_memory_bytes(config.pointer, slots), error)
    return number, "" if number >= 0 else text(error.text)


@dataclass
class MemoryLinks:
    """Links every rank of this host through shared memory."""

    context: Context
    sockets: dict[int, socket.socket]
    by_rank: dict[int, Descriptors] = field(default_factory=dict)

    def exchange(self, memory: int, deadline: float) -> None:
        """Passes descriptors both ways on every socket and hands them to the core, which keeps copies.

        `memory` describes the shared memory on local rank 0, whose own it stays; it is -1 on the others.
        """
        rank = self.context.rank
        own = self.by_rank[rank] = Descriptors(memory=os.dup(memory) if memory >= 0 else -1)
        try:
            own.engine, own.waiter = _create(lib.srt_doorbell_create), _create(lib.srt_doorbell_create)
            own.process = lib.srt_process_open(ffi.new("srt_error *"))  # without one, the sockets have to do
            for connection in self.sockets.values():
                own.send(connection)
            for peer, connection in self.sockets.items():
                self.by_rank[peer] = _receive(connection, peer, deadline)
            self.context.link_memory(self._shared(rank))
        finally:
            for descriptors in self.by_rank.values():
                descriptors.close()
            close_all(self.sockets)

    def _shared(self, rank: int) -> SharedMemory:
        ranks = sorted(self.by_rank)
        given = [self.by_rank[r] for r in ranks]
        memory = next((d.memory for d in given if d.memory >= 0), -1)
        if memory < 0:
            raise BootstrapError("no rank of this host passed the shared memory")
        return SharedMemory(
            descriptor=memory,
            address=0,
            slot=ranks.index(rank),
            ranks=ranks,
            engine_doorbells=[d.engine for d in given],
            waiter_doorbells=[d.waiter for d in given],
            process_descriptors=[d.process for d in given],
            socket_descriptors=[self.sockets[r].fileno() if r != rank else -1 for r in ranks],
        )


def link_sockets(context: Context, sockets: dict[int, socket.socket]) -> None:
    """Links every rank through its socket, which the core takes over."""
    with contextlib.ExitStack() as unlinked:
        for connection in sockets.values():
            unlinked.callback(connection.close)
        for rank, connection in sockets.items():
            context.link_socket(rank, connection.fileno())
            connection.detach()
