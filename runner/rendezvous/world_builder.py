"""Turns a rank's position in a world into a running context: describe, check, connect, start."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sirtaki.bindings import program_stack
from sirtaki.bindings.config import Config
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import knobs
from sirtaki.bindings.link_requests import first_links
from sirtaki.runner.rendezvous import mpi_links
from sirtaki.runner.rendezvous.descriptor_limit import allow_descriptors
from sirtaki.runner.rendezvous.identity import (
    Offer,
    RankDescription,
    agree,
    describe_process,
    disagreement,
    pack,
    pack_settings,
    ranks_of_host,
    topology_of,
    unpack,
    unpack_offer,
    unpack_settings,
)
from sirtaki.runner.rendezvous.job import Identity, RendezvousError
from sirtaki.runner.rendezvous.late_links import LateLinks, Neighbourhood
from sirtaki.runner.rendezvous.links import Connections, PeerEndpoint, close_all, connect_all, link_sockets
from sirtaki.runner.rendezvous.memory import MemoryLinks, create_memory
from sirtaki.runner.rendezvous.peer_listener import Handshakes, PeerListener
from sirtaki.runner.rendezvous.providers import World
from sirtaki.runner.rendezvous.rendezvous_client import RendezvousClient
from sirtaki.runner.rendezvous.wire import printable

# Part of the time after which an operation without progress fails: a rank that cannot be reached is named
# before, with the reason.
_LINK_PATIENCE = 0.75


def single_rank_context(config: Config) -> Context:
    """Returns a running world of one."""
    context = Context(topology_of(0, [describe_process("", {})]), config)
    context.start()
    return context


@dataclass
class WorldBuilder:
    """The init() of one rank in a world of several; the generation counts the init() calls of its process.

    `role` describes a process that is no rank of its job.
    """

    world: World
    generation: int
    client: RendezvousClient
    config: Config
    role: str = ""
    _elsewhere: dict[int, list[str]] = field(default_factory=dict)  # addresses that this rank connects to

    def run(self) -> Context:
        """Returns the running context once every rank has its links.

        Raises:
            RendezvousError: ranks contradict each other, or one failed.
            RendezvousTimeout: a rank did not arrive in time.
        """
        with contextlib.ExitStack() as cleanup, contextlib.ExitStack() as listening:
            listener = listening.enter_context(PeerListener(self.world.folder))
            members = self._exchange_descriptions(listener.name)
            try:
                context, late_links = self._link(members, listener, cleanup)
                # No rank starts before all have their links.
                states = self.client.all_gather(mpi_links.state(self.config, self.world))
                self._link_over_mpi(context, members, states)
            except Exception as error:
                shown = RendezvousError(_describe_os_error(error)) if isinstance(error, OSError) else error
                first = self._first_failure(shown)
                if self.world.on_no_link is not None and self._elsewhere:
                    self.world.on_no_link(self._elsewhere)
                if first is not error:
                    raise first from None
                raise
            program_stack.register_stack_source(context)
            context.start()
            if late_links is not None:
                listening.pop_all()
                late_links.start(listener)
        return context

    def _first_failure(self, error: Exception) -> Exception:
        """Reports to the other ranks why this one failed, before they see its connections close.

        Returns the failure that came first in this init(), which may be another rank's.
        """
        culprit = getattr(error, "culprit", None)
        text = printable(str(error), 1000) or type(error).__name__
        return self.client.report_failure(text, self.world.rank if culprit is None else culprit) or error

    def _link(
        self, members: Sequence[RankDescription], listener: PeerListener, cleanup: contextlib.ExitStack
    ) -> tuple[Context, LateLinks | None]:
        """Returns the context with its first links, and what makes further ones, if it will need any."""
        world = self.world
        context = Context(topology_of(world.rank, members), self.config)
        if len(members) == 1:
            return context, None
        mpi_links.check(self.config, world)
        local_ranks = ranks_of_host(world.rank, members)
        memory, no_memory = self._memory(local_ranks)
        cleanup.callback(_close, memory)
        spans_hosts = len(local_ranks) < len(members)
        addresses: list[str] = []
        if spans_hosts:
            addresses = listener.listen_to_hosts(self.client.own_addresses(), world.job)
        mine = Offer(addresses, no_memory)
        offers = [unpack_offer(payload) for payload in self.client.all_gather(pack(mine))]
        deadline = time.monotonic() + world.start_timeout
        # Jobs that share a key and an id differ by the rendezvous's session.
        job = replace(world.job, id=f"{world.job.id}/{self.client.session.hex()}")
        handshakes = Handshakes(job, Identity(world.rank, self.generation), deadline, self.client)
        connections: Connections = {}
        cleanup.callback(close_all, connections)
        endpoints = self._endpoints(members, offers)
        uses_memory = self._uses_memory(local_ranks, offers)
        needed = frozenset(first_links(context))
        passing: Sequence[int] = []
        if uses_memory:  # the lowest rank passes all descriptors; the memory then serves as their links
            passing = local_ranks[1:] if world.rank == local_ranks[0] else local_ranks[:1]
            needed -= frozenset(local_ranks)
        connect_all(
            listener, {rank: endpoints[rank] for rank in (*needed, *passing)}, handshakes, connections
        )
        if uses_memory:
            local = {rank: connections.pop((rank, 0)) for rank in passing}
            cleanup.callback(close_all, local)
            sockets = {rank: one for rank, one in local.items() if isinstance(one, socket.socket)}
            MemoryLinks(context, local_ranks, sockets, self.client).exchange(memory, deadline)
            if not spans_hosts:
                return context, None
        link_sockets(context, connections)
        allow_descriptors(sum(endpoint.channels for endpoint in endpoints.values()))
        patience = _LINK_PATIENCE * float(self.config.get("progress_deadline"))
        neighbourhood = Neighbourhood(endpoints, needed, patience)
        return context, LateLinks(context, neighbourhood, replace(handshakes, rendezvous=None))

    def _link_over_mpi(
        self, context: Context, members: Sequence[RankDescription], states: Sequence[bytes]
    ) -> None:
        """Has MPI move the data between hosts, if it is to. It waits for all ranks: none may have failed."""
        here = members[self.world.rank].host
        others = [rank for rank, member in enumerate(members) if member.host != here]
        if others and self.config.get("transport") == "mpi":
            mpi_links.link(context, self.world, states, others)
            self.client.all_gather(b"")

    def _exchange_descriptions(self, listens_at: str) -> list[RankDescription]:
        agreed = {knob.name: self.config.get(knob.name) for knob in knobs() if knob.agreed}
        mine = describe_process(listens_at, agreed, self.role)
        members = [unpack(payload) for payload in self.client.all_gather(pack(mine))]
        if not agree(members):  # as all ranks find
            settings = self.client.all_gather(pack_settings(agreed))
            raise disagreement([unpack_settings(payload) for payload in settings])
        return members

    def _memory(self, local_ranks: Sequence[int]) -> tuple[int, str]:
        """Creates this host's memory on its lowest rank: (descriptor or -1, why there is none)."""
        transport = self.config.get("transport")
        if self.world.rank != local_ranks[0] or len(local_ranks) == 1 or transport == "socket":
            return -1, ""
        descriptor, refusal = create_memory(self.config, len(local_ranks))
        if refusal and transport == "shm":
            raise RendezvousError(f"transport is shm, but there is no shared memory here: {refusal}")
        if refusal:
            sys.stderr.write(
                f"sirtaki: no shared memory here ({refusal}); the ranks exchange data over sockets\n"
            )
        return descriptor, refusal

    def _uses_memory(self, local_ranks: Sequence[int], offers: Sequence[Offer]) -> bool:
        refused = offers[local_ranks[0]].no_memory or self.config.get("transport") == "socket"
        return len(local_ranks) > 1 and not refused

    def _endpoints(
        self, members: Sequence[RankDescription], offers: Sequence[Offer]
    ) -> dict[int, PeerEndpoint]:
        """Returns how this rank reaches each other one."""
        here = members[self.world.rank].host
        channels = int(self.config.get("sockets_per_link"))
        endpoints = {}
        for rank, (member, offer) in enumerate(zip(members, offers, strict=True)):
            name = f"rank {rank} (pid {member.pid} on {member.hostname})"
            if member.host == here:
                endpoints[rank] = PeerEndpoint(name, [member.listens_at])
            elif not offer.addresses:
                raise RendezvousError(f"{name} has no network address that other hosts could reach it at")
            else:
                endpoints[rank] = PeerEndpoint(name, list(offer.addresses), channels)
                if rank < self.world.rank:  # the others connect to this one
                    self._elsewhere[rank] = endpoints[rank].addresses
        del endpoints[self.world.rank]
        return endpoints


def _describe_os_error(error: OSError) -> str:
    advice = ": raise the limit with `ulimit -n`" if error.errno == errno.EMFILE else ""
    return f"{error.strerror or error}{advice}"


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
