"""Turns a rank's place in a world into a running context: introduce, check, connect, start."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import program_stack
from ..context import Config, Context
from ..library import knobs
from .handshake import BootstrapError, Identity, Job, printable
from .identity import (
    Member,
    Offer,
    check_agreement,
    introduce,
    ranks_of_host,
    topology_of,
    unpack,
    unpack_offer,
)
from .links import Connections, Whereabouts, close_all, connect_all, link_sockets
from .memory import MemoryLinks, create_memory
from .providers import World
from .reception import Meeting, Reception
from .store import StoreClient


def join_alone(config: Config) -> Context:
    """Returns a running world of one."""
    context = Context(topology_of(0, [introduce("", {})]), config)
    context.start()
    return context


@dataclass
class Join:
    """The init() of one rank in a world of several; the generation counts the init() calls of its process."""

    world: World
    generation: int
    client: StoreClient
    config: Config

    def run(self) -> Context:
        """Returns the running context once every rank has its links.

        Raises:
            BootstrapError: ranks contradict each other, or one failed.
            BootstrapTimeout: a rank did not arrive in time.
        """
        with Reception(self.world.folder) as reception, contextlib.ExitStack() as at_the_end:
            members = self._introduce(reception.name)
            try:
                context = self._linked(members, reception, at_the_end)
                self.client.all_gather(b"")  # no rank starts before all have their links
            except OSError as error:
                raise self._first_failure(BootstrapError(_in_words(error))) from None
            except Exception as error:
                if (first := self._first_failure(error)) is not error:
                    raise first from None
                raise
        program_stack.show_to(context)
        context.start()
        return context

    def _first_failure(self, error: Exception) -> Exception:
        """Reports to the other ranks why this one failed, before they see its connections close.

        Returns the failure that came first in this init(), which may be another rank's.
        """
        culprit = getattr(error, "culprit", None)
        text = printable(str(error), 1000) or type(error).__name__
        return self.client.give_up(text, self.world.rank if culprit is None else culprit) or error

    def _linked(
        self, members: Sequence[Member], reception: Reception, at_the_end: contextlib.ExitStack
    ) -> Context:
        world = self.world
        context = Context(topology_of(world.rank, members), self.config)
        if len(members) == 1:
            return context
        locals_ = ranks_of_host(world.rank, members)
        memory, no_memory = self._memory(locals_)
        at_the_end.callback(_close, memory)
        spans_hosts = len(locals_) < len(members)
        addresses = self._open_to_hosts(reception) if spans_hosts else []
        offers = self._exchange_offers(Offer(addresses, no_memory))
        deadline = time.monotonic() + world.start_timeout
        meeting = Meeting(self._job(), Identity(world.rank, self.generation), deadline, self.client)
        connections: Connections = {}
        at_the_end.callback(close_all, connections)
        connect_all(reception, self._whereabouts(members, offers), meeting, connections)
        if self._uses_memory(locals_, offers):
            own_host = {place: one for place, one in connections.items() if place[0] in locals_}
            local = {rank: one for (rank, _), one in own_host.items() if isinstance(one, socket.socket)}
            MemoryLinks(context, local, keeps_sockets=spans_hosts).exchange(memory, deadline)
            if not spans_hosts:
                return context
        link_sockets(context, connections)
        return context

    def _job(self) -> Job:
        """Returns the job that ranks authenticate for: jobs that share a key and an id differ by session."""
        return replace(self.world.job, id=f"{self.world.job.id}/{self.client.session.hex()}")

    def _open_to_hosts(self, reception: Reception) -> list[str]:
        return reception.open_to_hosts(self.client.own_addresses(), self.world.job.key)

    def _introduce(self, listens_at: str) -> list[Member]:
        agreed = {knob.name: self.config.get(knob.name) for knob in knobs() if knob.agreed}
        mine = introduce(listens_at, agreed)
        members = [unpack(payload) for payload in self.client.all_gather(mine.pack())]
        check_agreement(members)
        return members

    def _memory(self, locals_: Sequence[int]) -> tuple[int, str]:
        """Creates this host's memory on its lowest rank: (descriptor or -1, why there is none)."""
        transport = self.config.get("transport")
        if self.world.rank != locals_[0] or len(locals_) == 1 or transport == "socket":
            return -1, ""
        number, refusal = create_memory(self.config, len(locals_))
        if refusal and transport == "shm":
            raise BootstrapError(f"transport is shm, but there is no shared memory here: {refusal}")
        if refusal:
            sys.stderr.write(
                f"sirtaki: no shared memory here ({refusal}); the ranks exchange data over sockets\n"
            )
        return number, refusal

    def _uses_memory(self, locals_: Sequence[int], offers: Sequence[Offer]) -> bool:
        refused = offers[locals_[0]].no_memory or self.config.get("transport") == "socket"
        return len(locals_) > 1 and not refused

    def _exchange_offers(self, mine: Offer) -> list[Offer]:
        return [unpack_offer(payload) for payload in self.client.all_gather(mine.pack())]

    def _whereabouts(self, members: Sequence[Member], offers: Sequence[Offer]) -> dict[int, Whereabouts]:
        """Returns how this rank reaches each other one."""
        here = members[self.world.rank].host
        channels = int(self.config.get("sockets_per_link"))
        found = {}
        for rank, (member, offer) in enumerate(zip(members, offers, strict=True)):
            name = f"rank {rank} (pid {member.pid} on {member.hostname})"
            if member.host == here:
                found[rank] = Whereabouts(name, [member.listens_at])
            elif not offer.addresses:
                raise BootstrapError(f"{name} has no network address that other hosts could reach it at")
            else:
                found[rank] = Whereabouts(name, list(offer.addresses), channels)
        del found[self.world.rank]
        return found


def _in_words(error: OSError) -> str:
    advice = ": raise the limit with `ulimit -n`" if error.errno == errno.EMFILE else ""
    return f"{error.strerror or error}{advice}"


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
