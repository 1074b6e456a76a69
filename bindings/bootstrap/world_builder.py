"""Turns a rank's position in a world into a running context: describe, check, connect, start."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from sirtaki.bindings.bootstrap.connection.address import host_identity, is_unix, split_address
from sirtaki.bindings.bootstrap.connection.connect import Meanwhile, connect
from sirtaki.bindings.bootstrap.connection.descriptor_limit import allow_descriptors
from sirtaki.bindings.bootstrap.connection.handshake import CHOSEN, HandshakeSteps, is_trusted_user
from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.bindings.bootstrap.job import Identity, RendezvousError, RendezvousTimeout
from sirtaki.bindings.bootstrap.memory import MemoryLinks, create_memory
from sirtaki.bindings.bootstrap.peer_listener import Handshakes, LinkKey, PeerListener, has_ended
from sirtaki.bindings.bootstrap.providers import World
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.bindings.library import Config, ffi, knobs, lib
from sirtaki.bindings.observing.observe import register_stack_source
from sirtaki.bindings.topology import Peer, Topology

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection


_MAX_ADDRESSES = 64
# Raised when a value of the wrong type or size is read out of JSON, endless nesting included.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class RankDescription:
    """A rank's description of itself.

    Attributes:
        host: its host, in a form that equals no other host's (boot and network namespace).
        hostname: the host's usual name.
        pid: its process number on that host.
        listens_at: name of its abstract Unix socket.
        settings: a digest of its settings that must be equal on all ranks. Ranks exchange the settings
            themselves only if these differ, for they would be most of the bytes of a start.
    """

    host: str
    hostname: str
    pid: int
    listens_at: str
    settings: str


def pack(description: RankDescription | Offer) -> bytes:
    return json.dumps(asdict(description)).encode()


def unpack(payload: bytes) -> RankDescription:
    """Parses the description that an authenticated rank sent; raises RendezvousError if it is malformed."""
    try:
        values = json.loads(payload)
        settings, pid, listens_at = str(values["settings"]), int(values["pid"]), str(values["listens_at"])
        is_address = is_unix(listens_at) and listens_at.isascii() and listens_at.isprintable()
        if not 0 < pid < 1 << 31 or not (listens_at == "" or (is_address and len(listens_at) <= 100)):
            raise ValueError
        if not re.fullmatch("[0-9a-f]{64}", settings):
            raise ValueError
        hostname = _printable_line(values["hostname"], 100)
        return RankDescription(str(values["host"]), hostname, pid, listens_at, settings)
    except _MALFORMED:
        raise RendezvousError("a rank sent a malformed description of itself") from None


def pack_settings(settings: Mapping[str, str]) -> bytes:
    return json.dumps(settings, sort_keys=True).encode()


def unpack_settings(payload: bytes) -> Mapping[str, str]:
    """Parses the settings that an authenticated rank sent; raises RendezvousError if they are malformed."""
    try:
        return {
            _printable_line(name, 100): _printable_line(value, 200)
            for name, value in dict(json.loads(payload)).items()
        }
    except _MALFORMED:
        raise RendezvousError("a rank sent malformed settings") from None


def _printable_line(value: object, limit: int) -> str:
    return printable(str(value), limit).replace("\n", "?")


def describe_process(listens_at: str, settings: Mapping[str, str], role: str = "") -> RankDescription:
    """Returns the description of this process. The role, if any, is shown after the host name in texts."""
    hostname = f"{socket.gethostname()}, {role}" if role else socket.gethostname()
    digest = hashlib.sha256(pack_settings(settings)).hexdigest()
    return RankDescription(host_identity(), hostname, os.getpid(), listens_at, digest)


@dataclass(frozen=True)
class Offer:
    """The ways to reach a rank, determined once it is known which ranks share a host.

    Attributes:
        addresses: addresses that ranks of other hosts can try to connect to; empty if there are none.
        no_memory: why its host has no shared memory; "" if it has, or if another rank of the host reports it.
    """

    addresses: Sequence[str]
    no_memory: str


def unpack_offer(payload: bytes) -> Offer:
    """Parses the offer that an authenticated rank sent; raises RendezvousError if it is malformed."""
    try:
        values = json.loads(payload)
        addresses = [str(address) for address in list(values["addresses"])]
        if len(addresses) > _MAX_ADDRESSES:
            raise ValueError
        for address in addresses:
            ipaddress.ip_address(split_address(address)[0])
        return Offer(addresses, _printable_line(values["no_memory"], 500))
    except _MALFORMED:
        raise RendezvousError("a rank sent malformed addresses of itself") from None


def agree(members: Sequence[RankDescription]) -> bool:
    """Returns whether all ranks have the same settings that must be equal."""
    return all(member.settings == members[0].settings for member in members)


def disagreement(settings: Sequence[Mapping[str, str]]) -> RendezvousError:
    """Returns the error that names the first setting in which ranks differ, with both values."""
    first = settings[0]
    for rank, setting in enumerate(settings):
        for name in sorted(first.keys() | setting.keys()):
            ours, theirs = first.get(name), setting.get(name)
            if ours != theirs:
                variable = f"SIRTAKI_{name.upper()}"
                return RendezvousError(
                    f"the setting {name} is {ours} on rank 0 and {theirs} on rank {rank}: "
                    f"set {variable} to one value for all ranks"
                )
    return RendezvousError("ranks have other settings than they have announced")


def ranks_of_host(rank: int, members: Sequence[RankDescription]) -> list[int]:
    """Returns the ranks that share a host with `rank`, ascending, itself included."""
    return [other for other, member in enumerate(members) if member.host == members[rank].host]


def topology_of(rank: int, members: Sequence[RankDescription]) -> Topology:
    """Computes a rank's topology from the hosts of all ranks."""
    hosts = list(dict.fromkeys(member.host for member in members))
    ranks_of = {host: [r for r, member in enumerate(members) if member.host == host] for host in hosts}
    here = members[rank].host
    local_rank = ranks_of[here].index(rank)
    cross_hosts = [host for host in hosts if len(ranks_of[host]) > local_rank]
    peers = [Peer(member.hostname, member.pid, hosts.index(member.host)) for member in members]
    return Topology(
        rank, len(members), local_rank, len(ranks_of[here]), cross_hosts.index(here), len(cross_hosts), peers
    )


# ---- The start of a world ------------------------------------------------------------------------------

# Part of the time after which an operation without progress fails: a rank that cannot be reached is named
# before, with the reason.
_LINK_PATIENCE = 0.75


def single_rank_context(config: Config) -> Context:
    """Returns a running context of a world with a single rank."""
    context = Context(topology_of(0, [describe_process("", {})]), config)
    context.start()
    return context


@dataclass
class WorldBuilder:
    """Runs init() of a rank in a multi-rank world; `generation` counts the init() calls of its process.

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
                self.client.all_gather(b"")  # no rank starts before all have their links
                self._link_over_mpi(context, members)
            except Exception as error:
                shown = RendezvousError(_describe_os_error(error)) if isinstance(error, OSError) else error
                first = self._first_failure(shown)
                if self.world.on_no_link is not None and self._elsewhere:
                    self.world.on_no_link(self._elsewhere)
                if first is not error:
                    raise first from None
                raise
            register_stack_source(context)
            context.start()
            if late_links is not None:
                listening.pop_all()
                late_links.start(listener)
        return context

    def _first_failure(self, error: Exception) -> Exception:
        """Reports this rank's failure to the other ranks before they see its connections close.

        Returns the failure that came first in this init(), which may be another rank's.
        """
        culprit = getattr(error, "culprit", None)
        text = printable(str(error), 1000) or type(error).__name__
        return self.client.report_failure(text, self.world.rank if culprit is None else culprit) or error

    def _link(
        self, members: Sequence[RankDescription], listener: PeerListener, cleanup: contextlib.ExitStack
    ) -> tuple[Context, LateLinks | None]:
        """Returns the context with its initial connections, and the maker of lazy connections, if needed."""
        world = self.world
        context = Context(topology_of(world.rank, members), self.config)
        if len(members) == 1:
            return context, None
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
        needed = frozenset(_first_links(context))
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
            sockets = {rank: item for rank, item in local.items() if isinstance(item, socket.socket)}
            MemoryLinks(context, local_ranks, sockets, self.client).exchange(memory, deadline)
            if not spans_hosts:
                return context, None
        link_sockets(context, connections)
        allow_descriptors(sum(endpoint.channels for endpoint in endpoints.values()))
        patience = _LINK_PATIENCE * float(self.config.get("progress_deadline"))
        neighbourhood = Neighbourhood(endpoints, needed, patience)
        return context, LateLinks(context, neighbourhood, replace(handshakes, rendezvous=None))

    def _link_over_mpi(self, context: Context, members: Sequence[RankDescription]) -> None:
        """Has MPI move the data between hosts, if it is to. It waits for all ranks: none may have failed."""
        if self.config.get("transport") != "mpi" or len(members) == 1:
            return
        from sirtaki.bindings.bootstrap import mpi_links  # imported late: few jobs need it

        mpi_links.check(self.config, self.world)
        here = members[self.world.rank].host
        if others := [rank for rank, member in enumerate(members) if member.host != here]:
            states = self.client.all_gather(mpi_links.state(self.world))
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
        """Returns the addresses at which this rank reaches each other rank."""
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


# ---- The links that a rank makes while it runs: with whom an operation needs one, when it first does ----
# A rank starts with few links (`first_links` of the core). Both ranks of a further link ask for it when
# the same operation needs it. As at the start, the higher rank connects, and the lower one accepts.


_ATTEMPT_SECONDS = 15.0  # between checks whether the link is still needed
_PAUSE_SECONDS = 0.2  # between attempts
_JOIN_SECONDS = 1.0
_LONGEST_WAIT = 3600.0  # of the listener, which is woken when it has to end


@dataclass(frozen=True)
class Neighbourhood:
    """The other ranks, as a running rank sees them.

    Attributes:
        endpoints: how each of them is reached.
        linked: those with which the rank starts.
        seconds: that a rank may take to answer, before it counts as lost.
    """

    endpoints: Mapping[int, PeerEndpoint]
    linked: frozenset[int]
    seconds: float


@dataclass(eq=False)
class LateLinks:
    """Creates the lazy connections of a context on two threads: accepting and connecting.

    Created before the context starts; `start` takes over the listener afterwards.
    """

    context: Context
    neighbourhood: Neighbourhood
    handshakes: Handshakes
    _arrived: dict[int, Connections] = field(default_factory=dict)  # links of which connections are missing
    _accepted: set[int] = field(default_factory=set)  # ranks that have connected since the start

    def __post_init__(self) -> None:
        self._requests = LinkRequests(self.context)
        self._bell: socket.socket | None = None  # its end is that of the accepting thread
        self._listener: PeerListener | None = None
        self._threads = [
            threading.Thread(target=run, name="sirtaki links", daemon=True)
            for run in (self._accept, self._connect)
        ]
        _live.add(self)

    def start(self, listener: PeerListener) -> None:
        """Takes over the listener, and starts serving the context, which has started."""
        self._bell, other_end = socket.socketpair()
        listener.listen_for_wake(other_end)
        self._listener = listener
        self.context.end_callbacks.append(self.close)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads after the context has ended; a thread that is connecting ends by itself."""
        self._end_accepting()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def close_in_child(self) -> None:
        """Closes a forked child's duplicates, so that the end of the parent shows to the other ranks."""
        self._end_accepting()
        if self._listener is not None:
            self._listener.close_in_child()
        for connections in self._arrived.values():
            close_all(connections)

    def _end_accepting(self) -> None:
        if self._bell is not None:
            self._bell.close()

    # ---- Accepting: an `Arrivals` for the listener -------------------------------------------------------

    def wants(self, key: LinkKey) -> bool:
        rank, channel = key
        is_known = rank in self.neighbourhood.linked or rank in self._accepted
        endpoint = self.neighbourhood.endpoints.get(rank)
        if endpoint is None or is_known or rank < self.handshakes.mine.rank or channel >= endpoint.channels:
            return False
        earlier = self._arrived.get(rank, {}).get(key)
        return earlier is None or has_ended(earlier)

    def take(self, key: LinkKey, connection: Connection) -> None:
        rank, _ = key
        arrived = self._arrived.setdefault(rank, {})
        if key in arrived:  # and has ended
            arrived[key].close()
        arrived[key] = connection
        if len(arrived) == self.neighbourhood.endpoints[rank].channels:
            self._accepted.add(rank)
            self._hand_over(self._arrived.pop(rank))

    def _accept(self) -> None:
        assert self._listener is not None
        assert self._bell is not None
        try:
            with self._listener as listener:
                while self._bell.fileno() >= 0:
                    listener.poll(self.handshakes, self, _LONGEST_WAIT)
        except Exception as error:
            self.context.abort(f"it cannot accept links to other ranks any more: {error}")
            raise
        finally:
            for connections in self._arrived.values():
                close_all(connections)

    # ---- Connecting --------------------------------------------------------------------------------------

    def _connect(self) -> None:
        while (ranks := self._requests.collect()) is not None:
            for rank in sorted(ranks):
                if rank < self.handshakes.mine.rank:
                    self._link_to(rank)
        self._end_accepting()

    def _link_to(self, rank: int) -> None:
        endpoint = self.neighbourhood.endpoints[rank]
        connections: Connections = {}
        try:
            for channel in range(endpoint.channels):
                connections[rank, channel] = self._reach(endpoint, rank, channel)
            self._hand_over(connections)
        except Exception as error:  # without a thread that links, operations would wait in vain
            close_all(connections)
            self._requests.fail(rank, f"an operation needs a link to it, and there can be none: {error}")

    def _reach(self, endpoint: PeerEndpoint, rank: int, channel: int) -> Connection:
        """Connects to a rank. It may be busy, or have failed, of which this rank will hear: all attempts that
        fail are repeated.
        """
        deadline = time.monotonic() + self.neighbourhood.seconds
        while True:
            attempt = min(deadline, time.monotonic() + _ATTEMPT_SECONDS)
            try:
                return connect_to(endpoint, rank, channel, replace(self.handshakes, deadline=attempt))
            except RendezvousError:
                if self.context.failure is not None or time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _hand_over(self, connections: Connections) -> None:
        try:
            link_sockets(self.context, connections)
        except HorovodInternalError:
            close_all(connections)
            if self.context.failure is None and not self.context.is_shut_down:
                raise


_live: weakref.WeakSet[LateLinks] = weakref.WeakSet()


def _after_fork() -> None:
    for links in list(_live):
        links.close_in_child()


os.register_at_fork(after_in_child=_after_fork)


# ---- Connects to other ranks: over a Unix socket on this host, over TCP to other hosts -----------------
# Each rank listens (`peer_listener`); it connects to the lower ranks, and accepts the higher ones
# meanwhile, so none waits for another one's turn.


_CONNECT_SECONDS = 30.0  # all ranks listen before any connects: a rank that does not answer never will

Connections: TypeAlias = "dict[LinkKey, Connection]"


@dataclass(frozen=True)
class PeerEndpoint:
    """A rank's endpoint: its name in messages, the addresses to try, and the number of connections."""

    name: str
    addresses: list[str]
    channels: int = 1


def connect_all(
    listener: PeerListener,
    ranks: Mapping[int, PeerEndpoint],
    handshakes: Handshakes,
    connections: Connections,
) -> None:
    """Connects to each of these ranks, which do the same; puts the sockets into `connections`, by rank and
    channel.

    The caller closes them, including those made before an error.

    Raises:
        RendezvousError: a rank is gone, is unreachable, or is not the expected one.
        RendezvousTimeout: a rank did not arrive in time.
    """
    keys = [(rank, channel) for rank, endpoint in ranks.items() for channel in range(endpoint.channels)]
    expected = {key for key in keys if key[0] > handshakes.mine.rank}
    accepting = listener.accept(handshakes, expected, connections)
    for rank, channel in sorted(set(keys) - expected):
        connections[rank, channel] = connect_to(ranks[rank], rank, channel, handshakes, accepting)
    accepting.finish()


def connect_to(
    endpoint: PeerEndpoint,
    rank: int,
    channel: int,
    handshakes: Handshakes,
    meanwhile: Meanwhile | None = None,
) -> Connection:
    """Connects to a rank that accepts, and serves `meanwhile` until then. Raises as `connect_all`."""

    def begin_handshake(connection: socket.socket) -> HandshakeSteps:
        if connection.family == socket.AF_UNIX and not is_trusted_user(connection):
            raise RendezvousError(f"another user's process answers where rank {rank} should be")
        return handshakes.begin_handshake(connection, rank, channel)

    deadline = min(handshakes.deadline, time.monotonic() + _CONNECT_SECONDS)
    try:
        connection, _ = connect(endpoint.addresses, begin_handshake, deadline, meanwhile)
        choose(connection)
        return connection
    except RendezvousTimeout as error:
        if all(map(is_unix, endpoint.addresses)):
            raise RendezvousError(f"{endpoint.name} is gone: {error}", rank) from None
        raise RendezvousTimeout(
            f"{endpoint.name} cannot be reached: {error}. The network between the hosts has to allow every "
            "port: is there a firewall? SIRTAKI_NETWORK_INTERFACES=eth0, for example, selects the network to "
            "use"
        ) from None
    except ConnectionError as error:
        raise RendezvousError(f"{endpoint.name} is gone: {error.strerror or error}", rank) from None
    except OSError as error:  # no descriptors, for example: the other rank is not to blame
        raise RendezvousError(f"no connection to {endpoint.name}: {error.strerror or error}") from None


def choose(connection: Connection) -> None:
    """Sends CHOSEN: the accepting rank uses this connection. If it is gone, closes and raises OSError."""
    try:
        connection.send(CHOSEN)
    except OSError:
        connection.close()
        raise


def close_all(connections: Mapping[Any, Connection]) -> None:
    for connection in connections.values():
        connection.close()


def link_sockets(context: Context, sockets: Connections) -> None:
    """Hands the sockets to the core as links, in the order of their channels; the core takes ownership."""
    for (rank, _), connection in sorted(sockets.items()):
        if isinstance(connection, socket.socket):
            context.link_socket(rank, connection.fileno())
            connection.detach()
        else:
            connection.give_to(context, rank)


# ---- The links of a rank that are made while it runs, when an operation first needs them ---------------


_OK: int = lib.SRT_OK
_IN_PROGRESS: int = lib.SRT_IN_PROGRESS
_SLICE_MS = 10_000
_CAPACITY = 256  # peers that one call reports


def _first_links(context: Context) -> list[int]:
    """Returns the ranks to which `Context.start` needs links, ascending, before it is called."""
    peers: Any = ffi.new("int32_t[]", context.size)
    return list(peers[0 : lib.srt_first_links(context.pointer, peers, context.size)])


class LinkRequests:
    """The requests for lazy connections, for a single thread. Create it before `Context.start`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._peers: Any = ffi.new("int32_t[]", _CAPACITY)
        self._count: Any = ffi.new("int32_t *")
        lib.srt_allow_link_requests(context.pointer)

    def collect(self) -> list[int] | None:
        """Returns ranks to which links are needed; sleeps until there are any, with the interpreter's lock
        released. None: no further link will be needed.
        """
        while True:
            status = lib.srt_wait_link_requests(
                self._context.pointer, self._peers, _CAPACITY, self._count, _SLICE_MS
            )
            if status == _OK:
                return list(self._peers[0 : self._count[0]])
            if status != _IN_PROGRESS:
                return None

    def fail(self, rank: int, text: str) -> None:
        """Reports that there can be no link to a rank: it counts as lost, with this text."""
        lib.srt_fail_link(self._context.pointer, rank, text.encode("utf-8", "replace").replace(b"\0", b" "))
