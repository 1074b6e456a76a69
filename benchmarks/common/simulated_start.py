"""A model of init() among many ranks: the messages and handshakes of the rendezvous as it is, at the costs
that they have on this machine.

The costs come from the rendezvous' own code: its server, its handshake, and the processing of all ranks'
descriptions, which runs here at full size. The order of the steps follows `world_builder.py`: three
all-gathers through one server, and between the second and the third one the connections. The ranks of the
server's host connect to it, those of each other host to their collector, which has one connection to it. A
rank connects to the lower ranks among its first links one after another, and accepts the higher ones
meanwhile; ranks that share memory connect to the lowest one of their host.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common import native
from common.options import MIB
from sirtaki.bindings.bootstrap import identity, messages
from sirtaki.bindings.bootstrap.connection.handshake import handshake_steps
from sirtaki.bindings.bootstrap.connection.handshake_connection import HandshakeConnection
from sirtaki.bindings.bootstrap.connection.wire import frame_header
from sirtaki.bindings.bootstrap.job import Identity, Job, LinkKind, Role
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.bindings.config import Config
from sirtaki.bindings.library import knobs

ROUND_TRIPS = 2.5  # of a connection: TCP's, and those of the handshake
DESCRIPTORS_OF_A_RANK = 3  # doorbells and process, which each rank of the host receives
CLIENTS = 24  # by which the server's costs are measured
HANDSHAKES = 200
ADDRESSES = ["10.0.0.1:40000", "192.168.0.1:40000"]  # of a rank; a host has several


@dataclass(frozen=True)
class StartCosts:
    """Seconds of a processor, measured on this machine."""

    handshake: float  # one side of a connection between ranks
    descriptor: float  # passed to a rank of the same host, and closed
    server_join: float  # of the server, for a rank that joins
    server_gather: float  # of the server, for the contribution of a rank, without the bytes of the answer
    stream: float  # bytes per second that a processor sends or receives
    base: float = 0.0  # of a rank, for everything else


@dataclass(frozen=True)
class Start:
    """A simulated init()."""

    ranks: int
    seconds: float
    phases: dict[str, float]  # elapsed seconds
    connections: int  # of the rank that has most of them
    sent_frames: int  # by the server: its answers
    sent_by_server: int  # bytes
    most_held: int  # bytes of one answer, which the server holds once for all connections
    processor: float  # seconds, of one rank


@dataclass(frozen=True)
class Place:
    """The hosts and the network.

    Attributes:
        each: ranks on each host.
        latency: seconds between two hosts.
        bandwidth: bytes per second of a host's cable.
        processors: shared by all ranks and the server; 0: each has its own.
        has_collectors: whether hosts have collectors, as in jobs of hvdrun that are not elastic.
    """

    each: int
    latency: float
    bandwidth: float
    processors: int = 0
    has_collectors: bool = True


@dataclass(frozen=True)
class Descriptions:
    """The cost of all ranks' descriptions for one rank, and the size of the answers that hold them."""

    seconds: tuple[float, float, float]  # by all-gather
    sizes: tuple[int, int, int]


def simulate_all(options: Namespace) -> list[Start]:
    (machine,) = native.run("calibrate")
    costs = measure_costs(machine["stream"] * 1e6)
    place = Place(options.each, options.latency * 1e-6, options.gigabits * 1e9 / 8, options.cores)
    return [simulate_start(ranks, place, costs, describe(ranks, options.each)) for ranks in options.ranks]


def base_of(seconds: float, ranks: int, place: Place) -> float:
    """Returns the base that makes a start of some ranks take this much longer."""
    return max(seconds, 0.0) / _crowd(ranks, place)


def _crowd(ranks: int, place: Place) -> float:
    """Returns how many ranks share a processor."""
    return max(ranks / place.processors, 1.0) if place.processors else 1.0


def simulate_start(ranks: int, place: Place, costs: StartCosts, described: Descriptions) -> Start:
    """Returns the init() of a world of several ranks, all of which begin at the same moment."""
    crowd = _crowd(ranks, place)
    local = min(place.each, ranks)
    gathers = [
        _gather(ranks, local, size, place, costs) + crowd * seconds
        for size, seconds in zip(described.sizes, described.seconds, strict=True)
    ]
    linked = Links.of(ranks, place.each)
    descriptors = DESCRIPTORS_OF_A_RANK * local * (local > 1)
    behind = ranks_behind_collectors(ranks, place)
    direct = connections_to_server(ranks, place)
    phases = {
        "join": (direct + max(behind, default=0)) * costs.server_join
        + sum(behind) * costs.server_gather
        + crowd * costs.handshake
        + ROUND_TRIPS * 2 * place.latency,
        "gather": sum(gathers),
        "links": _links(linked, place, costs),
        "memory": crowd * descriptors * costs.descriptor,
        "start": crowd * costs.base,
    }
    received = sum(described.sizes) / costs.stream
    processor = (
        costs.handshake * (1 + 2 * linked.all / ranks)
        + sum(described.seconds)
        + received
        + descriptors * costs.descriptor
        + costs.base
    )
    return Start(
        ranks,
        sum(phases.values()),
        phases,
        linked.most,
        len(described.sizes) * direct,
        sum(bytes_of_answers(ranks, place, size) for size in described.sizes),
        max(described.sizes),
        processor,
    )


def ranks_behind_collectors(ranks: int, place: Place) -> list[int]:
    """Returns the number of ranks of each host with a collector: of several ranks, and not the server's."""
    if not place.has_collectors:
        return []
    hosts = [min(place.each, ranks - first) for first in range(place.each, ranks, place.each)]
    return [count for count in hosts if count > 1]


def connections_to_server(ranks: int, place: Place) -> int:
    behind = ranks_behind_collectors(ranks, place)
    return ranks - sum(behind) + len(behind)


def bytes_of_answers(ranks: int, place: Place, size: int) -> int:
    """Returns the bytes that the server sends when all of an all-gather are there; `size`: of the answer."""
    headers = sum(
        len(messages.pack_delivery(range(count))) for count in ranks_behind_collectors(ranks, place)
    )
    return connections_to_server(ranks, place) * (len(frame_header(size)) + size) + headers


def _gather(ranks: int, local: int, size: int, place: Place, costs: StartCosts) -> float:
    """Returns the seconds from the contributions to the last rank's answer, without its processing.

    A collector receives the answer, and sends it to its ranks.
    """
    connections = connections_to_server(ranks, place)
    behind = ranks_behind_collectors(ranks, place)
    processor = ranks * costs.server_gather + connections * size / costs.stream
    cable = (connections - local) * size / place.bandwidth
    collector = (1 + behind[0]) * size / costs.stream if behind else 0.0
    return max(processor, cable) + collector + size / costs.stream + 2 * place.latency


@dataclass(frozen=True)
class Links:
    """The links with which the ranks start.

    Attributes:
        most: those of the rank that has most of them.
        all: those of all ranks, each counted once.
        connects: those of the rank that connects to most others, one after another.
    """

    most: int
    all: int
    connects: int

    @classmethod
    def of(cls, ranks: int, each: int) -> Links:
        (found,) = native.run("first_links", f"ranks={ranks}", f"each={each}")
        return cls(**found)


def _links(linked: Links, place: Place, costs: StartCosts) -> float:
    """Returns the seconds of the connections: those that one rank makes, and those that it accepts beside
    them; no processor does more than one at a time.
    """
    one = 2 * costs.handshake + ROUND_TRIPS * 2 * place.latency
    busiest = linked.connects * one + (linked.most - 1) * costs.handshake
    shared = linked.all * 2 * costs.handshake / place.processors if place.processors else 0.0
    return max(busiest, shared)


def describe(ranks: int, each: int) -> Descriptions:
    """Processes the descriptions of all ranks as each rank does, and measures it."""
    config = Config({})
    agreed = {knob.name: config.get(knob.name) for knob in knobs() if knob.agreed}
    own = identity.describe_process(f"unix:@sirtaki-{os.getpid()}-{16 * '0'}", agreed)
    members = [replace(own, host=f"{own.host}{rank // each}") for rank in range(ranks)]
    descriptions = tuple(identity.pack(member) for member in members)
    offers = tuple([identity.pack(identity.Offer(ADDRESSES if ranks > each else [], ""))] * ranks)
    first = timed(lambda: _read_descriptions(descriptions))
    second = timed(lambda: [identity.unpack_offer(one) for one in _received(offers)])
    third = timed(lambda: _received((b"",) * ranks))
    topology = timed(lambda: identity.topology_of(0, members))
    answers = [messages.pack_payloads(payloads) for payloads in (descriptions, offers, (b"",) * ranks)]
    first_size, second_size, third_size = map(len, answers)
    return Descriptions((first + topology, second, third), (first_size, second_size, third_size))


def _read_descriptions(descriptions: Sequence[bytes]) -> None:
    identity.agree([identity.unpack(one) for one in _received(descriptions)])


def _received(payloads: Sequence[bytes]) -> list[bytes]:
    return messages.unpack_payloads(messages.pack_payloads(tuple(payloads))[1:], len(payloads))


def timed(work: Callable[[], object]) -> float:
    """Returns the processor's seconds of some work, in this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measure_costs(stream: float) -> StartCosts:
    """Measures the costs of a start, except the base. stream: bytes per second of a processor."""
    join, gather = _measure_server()
    return StartCosts(_measure_handshake(), _measure_descriptor(), join, gather, stream)


def _measure_handshake() -> float:
    """Returns the seconds of one side, which include the connection."""
    job = Job("job", 2, os.urandom(32), "0")
    with socket.create_server(("127.0.0.1", 0), backlog=HANDSHAKES) as listener:
        return timed(lambda: [_shake_hands(job, listener) for _ in range(HANDSHAKES)]) / (2 * HANDSHAKES)


def _shake_hands(job: Job, listener: socket.socket) -> None:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_connection(listener.getsockname()))]
        sockets.append(opened.enter_context(listener.accept()[0]))
        sides = [
            HandshakeConnection(
                end, handshake_steps(job, Identity(rank), LinkKind.PEERS, role), time.monotonic() + 10, role
            )
            for rank, (end, role) in enumerate(zip(sockets, (Role.CONNECTS, Role.ACCEPTS), strict=True))
        ]
        while not all(side.is_complete for side in sides):
            assert all(side.advance() for side in sides)


def _measure_descriptor() -> float:
    """Returns the seconds to pass a descriptor to another process, to receive, duplicate and close it."""
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        numbers = [one.fileno()] * 250

        def work() -> None:
            for _ in range(10):
                socket.send_fds(one, [b"x"], numbers)
                for number in socket.recv_fds(other, 1, len(numbers))[1]:
                    os.close(os.dup(number))
                    os.close(number)

        return timed(work) / 2500


def _measure_server() -> tuple[float, float]:
    """Returns the seconds of a real server for a rank that joins, and for a contribution of 4 bytes."""
    job = Job("job", CLIENTS, os.urandom(32), "0")
    server = RendezvousServer("127.0.0.1:0", job)
    with contextlib.closing(server):
        clients: list[RendezvousClient] = []
        join = _serve(
            server, [lambda rank=rank: clients.append(_join(server, job, rank)) for rank in range(CLIENTS)]
        )
        gather = _serve(server, [lambda client=client: client.all_gather(b"") for client in clients])
        for client in clients:
            client.close()
    return join / CLIENTS, gather / CLIENTS


def _join(server: RendezvousServer, job: Job, rank: int) -> RendezvousClient:
    return RendezvousClient.connect(server.address, job, Identity(rank))


def _serve(server: RendezvousServer, calls: Sequence[object]) -> float:
    """Makes the calls in threads of their own, and serves them in this one, whose seconds it returns."""
    threads = [threading.Thread(target=call) for call in calls]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    began = time.thread_time()
    while any(thread.is_alive() for thread in threads):
        server.poll(0.001)
    seconds = time.thread_time() - began
    for thread in threads:
        thread.join()
    return seconds


STARTS: Sequence[tuple[str, Callable[[Any], str]]] = [
    ("ranks", lambda row: f"{row.ranks:,}"),
    ("init, s", lambda row: f"{row.seconds:,.2f}"),
    ("of it all-gathers", lambda row: f"{row.phases['gather']:,.2f}"),
    ("connections", lambda row: f"{row.phases['links']:,.2f}"),
    ("processor of a rank, s", lambda row: f"{row.processor:,.2f}"),
    ("connections of a rank", lambda row: f"{row.connections:,}"),
    ("server sends, MiB", lambda row: f"{row.sent_by_server / MIB:,.0f}"),
    ("holds at once", lambda row: f"{row.most_held / MIB:,.2f}"),
]
