"""Shared memory among the ranks of a host: each passes the others the descriptors that they need.

These are its doorbells, a descriptor of its process and, from the lowest rank, the memory itself. They are
sent over a Unix socket to each rank, which proves that the ranks are on one host.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field

from sirtaki.bindings.config import Config, check
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import ffi, lib, text
from sirtaki.bindings.topology import SharedMemory
from sirtaki.runner.rendezvous.job import RendezvousError, RendezvousTimeout


@dataclass
class Descriptors:
    """The descriptors that a rank passes to others of its host; -1 for a missing one."""

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

    def send(self, connection: socket.socket, rank: int) -> None:
        """Passes the descriptors to a rank. Raises RendezvousError if that rank is gone."""
        present = self.present()
        names = " ".join(name for name, _ in present).encode()
        try:
            socket.send_fds(connection, [names.ljust(_NAMES_BYTES)], [number for _, number in present])
        except ConnectionError as error:
            raise RendezvousError(f"rank {rank} is gone: {error.strerror}", rank) from None


_NAMES_BYTES = 64
_NAMES = {"engine", "waiter", "process", "memory"}


def _receive(connection: socket.socket, rank: int, deadline: float) -> Descriptors:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        names, numbers, *_ = socket.recv_fds(connection, _NAMES_BYTES, len(_NAMES), socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise RendezvousTimeout(f"rank {rank} did not pass its descriptors in time") from None
    except OSError as error:
        raise RendezvousError(f"rank {rank} is gone: {error.strerror}", rank) from None
    fields = names.decode("ascii", "replace").split()
    if len(fields) != len(numbers) or not set(fields) <= _NAMES or not {"engine", "waiter"} <= set(fields):
        for number in numbers:
            os.close(number)
        raise RendezvousError(f"rank {rank} is gone, or its descriptors could not be passed", rank)
    return Descriptors(**dict(zip(fields, numbers, strict=True)))


def _make_doorbell() -> int:
    error = ffi.new("srt_error *")
    number: int = lib.srt_doorbell_create(error)
    if number < 0:
        check(error[0].status, error)
    return number


def create_memory(config: Config, slots: int) -> tuple[int, str]:
    """Creates memory to share among `slots` ranks: (descriptor, ""), or (-1, why there is none)."""
    error = ffi.new("srt_error *")
    number = lib.srt_memory_create(config.pointer, slots, error)
    return number, "" if number >= 0 else text(error.text)


@dataclass
class MemoryLinks:
    """The links of this host's ranks through shared memory; `sockets` are those to each of them."""

    context: Context
    sockets: dict[int, socket.socket]
    keeps_sockets: bool = False  # they become links of their own, and no longer report the end of a rank
    by_rank: dict[int, Descriptors] = field(default_factory=dict)

    def exchange(self, memory: int, deadline: float) -> None:
        """Passes descriptors in both directions on every socket and hands them to the core, which duplicates
        them.

        `memory` describes the shared memory on local rank 0, which keeps owning it; it is -1 on the others.
        """
        rank = self.context.rank
        own = self.by_rank[rank] = Descriptors(memory=os.dup(memory) if memory >= 0 else -1)
        try:
            own.engine, own.waiter = _make_doorbell(), _make_doorbell()
            own.process = lib.srt_process_open(ffi.new("srt_error *"))  # if -1, the sockets report its end
            for peer, connection in self.sockets.items():
                own.send(connection, peer)
            for peer, connection in self.sockets.items():
                self.by_rank[peer] = _receive(connection, peer, deadline)
            self.context.link_memory(self._shared(rank))
        finally:
            for descriptors in self.by_rank.values():
                descriptors.close()

    def _shared(self, rank: int) -> SharedMemory:
        ranks = sorted(self.by_rank)
        given = [self.by_rank[r] for r in ranks]
        memory = next((d.memory for d in given if d.memory >= 0), -1)
        if memory < 0:
            raise RendezvousError("no rank of this host passed the shared memory")
        return SharedMemory(
            descriptor=memory,
            address=0,
            slot=ranks.index(rank),
            ranks=ranks,
            engine_doorbells=[d.engine for d in given],
            waiter_doorbells=[d.waiter for d in given],
            process_descriptors=[d.process for d in given],
            socket_descriptors=[
                -1 if r == rank or self.keeps_sockets else self.sockets[r].fileno() for r in ranks
            ],
        )
