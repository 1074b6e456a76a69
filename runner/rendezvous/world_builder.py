"""Turns a rank's position in a world into a running context: introduce, check, connect, start."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sirtaki.bindings import program_stack
from sirtaki.bindings.context import Config, Context
from sirtaki.bindings.library import knobs
from sirtaki.runner.rendezvous.identity import (
    Offer,
    RankDescription,
    check_agreement,
    introduce,
    ranks_of_host,
    topology_of,
    unpack,
    unpack_offer,
)
from sirtaki.runner.rendezvous.job import Identity, Job, RendezvousError
from sirtaki.runner.rendezvous.links import Connections, PeerEndpoint, close_all, connect_all, link_sockets
from sirtaki.runner.rendezvous.memory import MemoryLinks, create_memory
from sirtaki.runner.rendezvous.peer_listener import Handshakes, PeerListener
from sirtaki.runner.rendezvous.providers import World
from sirtaki.runner.rendezvous.rendezvous_client import RendezvousClient
from sirtaki.runner.rendezvous.wire import printable


def world_of_one(config: Config) -> Context:
    """Returns a running world of one."""
    context = Context(topology_of(0, [introduce("", {})]), config)
    context.start()
    return context


@dataclass
class WorldBuilder:
    """The init() of one rank in a world of several; the generation counts the init() calls of its process."""

    world: World
    generation: int
    client: RendezvousClient
    config: Config

    def run(self) -> Context:
        """Returns the running context once every rank has its links.

        Raises:
            RendezvousError: ranks contradict each other, or one failed.
            RendezvousTimeout: a rank did not arrive in time.
        """
        with PeerListener(self.world.folder) as listener, contextlib.ExitStack() as at_the_end:
            members = self._introduce(listener.name)
            try:
                context = self._linked(members, listener, at_the_end)
                self.client.all_gather(b"")  # no rank starts before all have their links
            except OSError as error:
                raise self._first_failure(RendezvousError(_in_words(error))) from None
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
        self, members: Sequence[RankDescription], listener: PeerListener, at_the_end: contextlib.ExitStack
    ) -> Context:
        world = self.world
        context = Context(topology_of(world.rank, members), self.config)
        if len(members) == 1:
            return context
        locals_ = ranks_of_host(world.rank, members)
        memory, no_memory = self._memory(locals_)
        at_the_end.callback(_close, memory)
        spans_hosts = len(locals_) < len(members)
        addresses = self._open_to_hosts(listener) if spans_hosts else []
        offers = self._exchange_offers(Offer(addresses, no_memory))
        deadline = time.monotonic() + world.start_timeout
        handshakes = Handshakes(self._job(), Identity(world.rank, self.generation), deadline, self.client)
        connections: Connections = {}
        at_the_end.callback(close_all, connections)
        connect_all(listener, self._endpoints(members, offers), handshakes, connections)
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

    def _open_to_hosts(self, listener: PeerListener) -> list[str]:
        return listener.open_to_hosts(self.client.own_addresses(), self.world.job.key)

    def _introduce(self, listens_at: str) -> list[RankDescription]:
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
            raise RendezvousError(f"transport is shm, but there is no shared memory here: {refusal}")
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

    def _endpoints(
        self, members: Sequence[RankDescription], offers: Sequence[Offer]
    ) -> dict[int, PeerEndpoint]:
        """Returns how this rank reaches each other one."""
        here = members[self.world.rank].host
        channels = int(self.config.get("sockets_per_link"))
        found = {}
        for rank, (member, offer) in enumerate(zip(members, offers, strict=True)):
            name = f"rank {rank} (pid {member.pid} on {member.hostname})"
            if member.host == here:
                found[rank] = PeerEndpoint(name, [member.listens_at])
            elif not offer.addresses:
                raise RendezvousError(f"{name} has no network address that other hosts could reach it at")
            else:
                found[rank] = PeerEndpoint(name, list(offer.addresses), channels)
        del found[self.world.rank]
        return found


def _in_words(error: OSError) -> str:
    advice = ": raise the limit with `ulimit -n`" if error.errno == errno.EMFILE else ""
    return f"{error.strerror or error}{advice}"


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
