"""Shared memory among the ranks of a host: each rank receives the descriptors of all of them.

These are each rank's doorbells, a descriptor of its process and, from the lowest rank, the memory itself.
Each rank passes its own to the lowest one, which then passes all of them to everyone. They are sent over Unix
sockets, which proves that the ranks are on one host. So a rank needs one connection on its host, however many
ranks there are; only the lowest one has more.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sirtaki.bindings.bootstrap.connection.descriptor_limit import allow_descriptors
from sirtaki.bindings.bootstrap.job import RendezvousError, RendezvousTimeout, name_ranks
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import Config, check, ffi, lib, text
from sirtaki.bindings.topology import SharedMemory

_FIELDS = ("engine", "waiter", "process", "memory")
_COPIES = 2  # those that are received, and the core's
_NEEDED = 0b0011  # as a mask of _FIELDS
_RANKS_PER_MESSAGE = 253 // len(_FIELDS)  # a message passes 253 descriptors at most: SCM_MAX_FD, unix(7)
_RETRY_SECONDS = (
    0.001  # while too many descriptors are in flight, which the receivers take one message at a time
)
_SLACK_SECONDS = (
    10.0  # the lowest rank gives up at the deadline and names the cause; the others wait for that
)


@dataclass
class Descriptors:
    """The descriptors that a rank shares with the other ranks of its host; -1 for a missing descriptor."""

    engine: int = -1
    waiter: int = -1
    process: int = -1
    memory: int = -1

    def present(self) -> list[int]:
        return [number for name in _FIELDS if (number := getattr(self, name)) >= 0]

    def mask(self) -> int:
        """Returns which of _FIELDS are present, as a sum of powers of two."""
        return sum(1 << bit for bit, name in enumerate(_FIELDS) if getattr(self, name) >= 0)

    def close(self) -> None:
        close(self.present())
        self.engine = self.waiter = self.process = self.memory = -1


def close(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)


def _send(connection: socket.socket, rank: int, given: Sequence[Descriptors], deadline: float) -> None:
    """Sends the descriptors of some ranks to a rank. Raises RendezvousError if that rank is gone."""
    for first in range(0, len(given), _RANKS_PER_MESSAGE):
        batch = given[first : first + _RANKS_PER_MESSAGE]
        masks = bytes(descriptors.mask() for descriptors in batch)
        numbers = [number for descriptors in batch for number in descriptors.present()]
        while not _has_sent(connection, rank, masks, numbers):
            if time.monotonic() > deadline:
                raise RendezvousTimeout(f"the descriptors for rank {rank} could not be passed in time")
            time.sleep(_RETRY_SECONDS)


def _has_sent(connection: socket.socket, rank: int, masks: bytes, numbers: Sequence[int]) -> bool:
    """Sends descriptors; returns False if too many are in flight already."""
    try:
        socket.send_fds(connection, [masks], numbers)
    except ConnectionError as error:
        raise RendezvousError(f"rank {rank} is gone: {error.strerror}", rank) from None
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        return False
    return True


def _receive(connection: socket.socket, rank: int, count: int) -> list[Descriptors]:
    """Receives a message with descriptors of `count` ranks. Raises RendezvousError if the sender is gone."""
    try:
        masks, numbers, flags, _ = socket.recv_fds(
            connection, count, count * len(_FIELDS), socket.MSG_CMSG_CLOEXEC
        )
    except OSError as error:
        raise RendezvousError(f"rank {rank} is gone: {error.strerror}", rank) from None
    bits = [bit for mask in masks for bit in range(8) if mask >> bit & 1]
    is_complete = len(masks) == count and all(mask & _NEEDED == _NEEDED for mask in masks)
    if not is_complete or len(bits) != len(numbers) or max(bits) >= len(_FIELDS):
        close(numbers)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise RendezvousError(f"rank {rank} is gone, or its descriptors could not be passed", rank)
    rest = iter(numbers)
    return [
        Descriptors(**{name: next(rest) for bit, name in enumerate(_FIELDS) if mask >> bit & 1})
        for mask in masks
    ]


def _make_doorbell() -> int:
    error = ffi.new("srt_error *")
    number: int = lib.srt_doorbell_create(error)
    if number < 0:
        check(error[0].status, error)
    return number


def open_process() -> int:
    """Returns a descriptor that reports the end of this process, or -1 if the system refuses it.

    Without one, the connection to the lowest rank reports the end of this process to that rank, whose abort
    then reaches the others.
    """
    number: int = lib.srt_process_open(ffi.new("srt_error *"))
    return number


def create_memory(config: Config, slots: int) -> tuple[int, str]:
    """Creates memory to share among `slots` ranks: (descriptor, ""), or (-1, why there is none)."""
    error = ffi.new("srt_error *")
    number = lib.srt_memory_create(config.pointer, slots, error)
    return number, "" if number >= 0 else text(error.text)


@dataclass
class MemoryLinks:
    """The links of this host's ranks through shared memory.

    Attributes:
        context: this rank.
        ranks: those of this host, ascending.
        sockets: connections to the lowest of them or, on that one, to all others.
        rendezvous: reports ranks that have failed meanwhile.
    """

    context: Context
    ranks: Sequence[int]
    sockets: dict[int, socket.socket]
    rendezvous: RendezvousClient
    by_rank: dict[int, Descriptors] = field(default_factory=dict)

    def exchange(self, memory: int, deadline: float) -> None:
        """Sends this rank's descriptors, receives all ranks' descriptors, and hands them to the core.

        The core duplicates the descriptors. `memory` describes the shared memory on the lowest rank, which
        keeps owning it; it is -1 on the other ranks.

        Raises RendezvousError if a rank is gone or has failed, RendezvousTimeout at the deadline.
        """
        rank, lowest = self.context.rank, self.ranks[0]
        allow_descriptors(_COPIES * len(_FIELDS) * len(self.ranks))
        own = Descriptors(memory=os.dup(memory) if memory >= 0 else -1)
        try:
            own.engine, own.waiter = _make_doorbell(), _make_doorbell()
            own.process = open_process()
            if rank == lowest:
                self._collect(own, deadline)
                self.context.link_memory(self._shared(rank))  # first, as the core wants it
                self._pass_all(deadline)
            else:
                _send(self.sockets[lowest], lowest, [own], deadline)
                self._receive_all(deadline + _SLACK_SECONDS)
                self.context.link_memory(self._shared(rank))
        finally:
            for descriptors in (own, *self.by_rank.values()):
                descriptors.close()

    def _collect(self, own: Descriptors, deadline: float) -> None:
        """Receives the descriptors of all other ranks."""
        self.by_rank[self.ranks[0]] = own
        for peer in self._arrivals(self.ranks[1:], deadline):
            self._receive(peer, [peer])

    def _pass_all(self, deadline: float) -> None:
        """Sends the descriptors of all ranks to every rank but the lowest."""
        given = [self.by_rank[rank] for rank in self.ranks]
        for peer in self.ranks[1:]:
            _send(self.sockets[peer], peer, given, deadline)

    def _receive_all(self, deadline: float) -> None:
        """Receives the descriptors of all ranks from the lowest rank."""
        for first in range(0, len(self.ranks), _RANKS_PER_MESSAGE):
            for sender in self._arrivals(self.ranks[:1], deadline):
                self._receive(sender, self.ranks[first : first + _RANKS_PER_MESSAGE])

    def _receive(self, sender: int, ranks: Sequence[int]) -> None:
        received = _receive(self.sockets[sender], sender, len(ranks))
        self.by_rank.update(zip(ranks, received, strict=True))

    def _arrivals(self, senders: Sequence[int], deadline: float) -> Iterator[int]:
        """Yields each of these ranks when it has sent a message, or has ended.

        Raises RendezvousError as soon as the rendezvous reports a failure, RendezvousTimeout at the deadline.
        """
        missing = {self.sockets[rank].fileno(): rank for rank in senders}
        reports = self.rendezvous.fileno()
        events = select.poll()
        for number in (*missing, reports):
            events.register(number, select.POLLIN)
        while missing:
            left = 0 if self.rendezvous.has_unread else max(deadline - time.monotonic(), 0)
            readable = [number for number, _ in events.poll(left * 1000)]
            if self.rendezvous.has_unread or reports in readable:
                self.rendezvous.raise_failure(deadline)
            if not readable:
                late = sorted(missing.values())
                raise RendezvousTimeout(
                    f"{name_ranks(late)} did not pass the descriptors of this host in time", late[0]
                )
            for number in readable:
                events.unregister(number)
                yield missing.pop(number)

    def _shared(self, rank: int) -> SharedMemory:
        given = [self.by_rank[r] for r in self.ranks]
        if given[0].memory < 0:
            raise RendezvousError(f"rank {self.ranks[0]} has not passed the shared memory", self.ranks[0])
        return SharedMemory(
            descriptor=given[0].memory,
            address=0,
            slot=self.ranks.index(rank),
            ranks=self.ranks,
            engine_doorbells=[d.engine for d in given],
            waiter_doorbells=[d.waiter for d in given],
            process_descriptors=[d.process for d in given],
            socket_descriptors=[self.sockets[r].fileno() if r in self.sockets else -1 for r in self.ranks],
        )
