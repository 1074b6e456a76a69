"""A model of init() among many ranks: the messages and handshakes of the rendezvous as it is, at the costs
that they have on this machine; and of an elastic change, which ends with one.

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
import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from common import native
from common.options import MIB
from common.report import Columns, Row
from sirtaki.bindings.bootstrap import messages, world_builder
from sirtaki.bindings.bootstrap.connection.handshake import HandshakeConnection, handshake_steps
from sirtaki.bindings.bootstrap.elastic import messages as elastic_messages
from sirtaki.bindings.bootstrap.job import Identity, Job, LinkKind, Role
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.bindings.library import Config, knobs

ROUND_TRIPS = 2.5  # of a connection: TCP's, and those of the handshake
DESCRIPTORS_OF_A_RANK = 3  # doorbells and process, which each rank of the host receives
CLIENTS = 24  # by which the server's costs are measured
HANDSHAKES = 200
PART, STREAM_ROUNDS = 64 << 10, 200  # bytes that fit into a socket's buffer, and how often they pass it
PACKED = 16  # messages by which the cost of one is measured
ADDRESSES = ["10.0.0.1:40000", "192.168.0.1:40000"]  # of a rank; a host has several


@dataclass(frozen=True)
class StartCosts:
    """Seconds of a processor, measured on this machine."""

    handshake: float  # one side of a connection between ranks
    descriptor: float  # passed to a rank of the same host, and closed
    server_join: float  # of the server, for a rank that joins
    server_gather: float  # of the server, for the contribution of a rank, without the bytes of the answer
    stream: float  # bytes per second that a processor sends or receives


@dataclass(frozen=True)
class Place:
    """The hosts and the network.

    Attributes:
        each: ranks on each host.
        latency: seconds between two hosts.
        bandwidth: bytes per second of a host's cable.
        has_collectors: whether hosts have collectors, as in jobs of hvdrun that are not elastic.
    """

    each: int
    latency: float
    bandwidth: float
    has_collectors: bool = True


@dataclass(frozen=True)
class Descriptions:
    """The cost of all ranks' descriptions for one rank, and the size of the answers that hold them."""

    seconds: tuple[float, float, float]  # by all-gather
    sizes: tuple[int, int, int]


def simulate_all(options: Namespace) -> list[Row]:
    costs = measure_costs()
    place = Place(options.each, options.latency * 1e-6, options.gigabits * 1e9 / 8)
    return [simulate_start(ranks, place, costs, describe(ranks, options.each)) for ranks in options.ranks]


def simulate_start(ranks: int, place: Place, costs: StartCosts, described: Descriptions) -> Row:
    """Returns the init() of a world of several ranks, all of which begin at the same moment.

    Seconds are elapsed, by phase, and those of a rank's processor. Connections are those of the rank that has
    most, frames and bytes those of the server's answers; it holds one answer at once for all connections.
    """
    local = min(place.each, ranks)
    gathers = [
        _gather(ranks, local, size, place, costs) + seconds
        for size, seconds in zip(described.sizes, described.seconds, strict=True)
    ]
    linked = first_links(ranks, place.each)
    descriptors = DESCRIPTORS_OF_A_RANK * local * (local > 1)
    behind = ranks_behind_collectors(ranks, place)
    direct = connections_to_server(ranks, place)
    phases = {
        "join": (direct + max(behind, default=0)) * costs.server_join
        + sum(behind) * costs.server_gather
        + costs.handshake
        + ROUND_TRIPS * 2 * place.latency,
        "gather": sum(gathers),
        "links": _links(linked, place, costs),
        "memory": descriptors * costs.descriptor,
    }
    received = sum(described.sizes) / costs.stream
    handshakes = costs.handshake * (1 + 2 * linked["all"] / ranks)
    return {
        "ranks": ranks,
        "seconds": sum(phases.values()),
        "phases": phases,
        "connections": linked["most"],
        "sent_frames": len(described.sizes) * direct,
        "sent_by_server": sum(bytes_of_answers(ranks, place, size) for size in described.sizes),
        "most_held": max(described.sizes),
        "processor": handshakes + sum(described.seconds) + received + descriptors * costs.descriptor,
    }


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
        len(messages.pack_delivery(range(count), b"", ranks))
        for count in ranks_behind_collectors(ranks, place)
    )
    return connections_to_server(ranks, place) * size + headers


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


def first_links(ranks: int, each: int) -> Row:
    """Returns the links with which the ranks start, as the core chooses them: `most`, those of the rank that
    has most, `all`, each counted once, and `connects`, those of the rank that connects to most others, one
    after another.
    """
    return native.run("first_links", ranks=ranks, each=each)


def _links(linked: Row, place: Place, costs: StartCosts) -> float:
    """Returns the seconds of the connections: those that one rank makes, and those that it accepts beside
    them; no processor does more than one at a time.
    """
    one = 2 * costs.handshake + ROUND_TRIPS * 2 * place.latency
    return linked["connects"] * one + (linked["most"] - 1) * costs.handshake


def describe(ranks: int, each: int) -> Descriptions:
    """Processes the descriptions of all ranks as each rank does, and measures it."""
    config = Config({})
    agreed = {knob.name: config.get(knob.name) for knob in knobs() if knob.agreed}
    own = world_builder.describe_process(f"unix:@sirtaki-{os.getpid()}-{16 * '0'}", agreed)
    members = [replace(own, host=f"{own.host}{rank // each}") for rank in range(ranks)]
    descriptions = tuple(world_builder.pack(member) for member in members)
    offers = tuple([world_builder.pack(world_builder.Offer(ADDRESSES if ranks > each else [], ""))] * ranks)
    first = timed(lambda: _read_descriptions(descriptions))
    second = timed(lambda: [world_builder.unpack_offer(one) for one in _received(offers)])
    third = timed(lambda: _received((b"",) * ranks))
    topology = timed(lambda: world_builder.topology_of(0, members))
    answers = [messages.pack_payloads(payloads) for payloads in (descriptions, offers, (b"",) * ranks)]
    first_size, second_size, third_size = (len(answer.pack(ranks)) for answer in answers)
    return Descriptions((first + topology, second, third), (first_size, second_size, third_size))


def _read_descriptions(descriptions: Sequence[bytes]) -> None:
    world_builder.agree([world_builder.unpack(one) for one in _received(descriptions)])


def _received(payloads: Sequence[bytes]) -> list[bytes]:
    return messages.unpack_payloads(messages.pack_payloads(payloads), len(payloads))


def timed(work: Callable[[], object]) -> float:
    """Returns the processor's seconds of some work, in this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measure_costs() -> StartCosts:
    join, gather = _measure_server()
    return StartCosts(_measure_handshake(), _measure_descriptor(), join, gather, _measure_stream())


def _measure_stream() -> float:
    """Returns the bytes per second that a processor sends or receives over loopback, in the best round."""
    data = memoryview(bytearray(PART))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sending = socket.create_connection(listener.getsockname())
        receiving, _ = listener.accept()

    def move() -> None:
        sending.sendall(data)
        received = 0
        while received < PART:
            received += receiving.recv_into(data[received:])

    with sending, receiving:
        return 2 * PART / min(timed(move) for _ in range(STREAM_ROUNDS))


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


STARTS: Columns = {
    "ranks": "{ranks:,}",
    "init, s": "{seconds:,.2f}",
    "of it all-gathers": "{phases[gather]:,.2f}",
    "connections": "{phases[links]:,.2f}",
    "processor of a rank, s": "{processor:,.2f}",
    "connections of a rank": "{connections:,}",
    "server sends, MiB": lambda row: f"{row['sent_by_server'] / MIB:,.0f}",
    "holds at once": lambda row: f"{row['most_held'] / MIB:,.2f}",
}


# ---- An elastic change: a host ends, and the other hosts go on as the next generation ------------------
# The steps are those of docs/design/elastic_protocol.md: the survivors learn of the loss, each enlists with
# the arbiter, which sends each the description of the new world, and all begin again with an init(). Messages
# are the real ones, at full size, and so is the time to write and to read them. Workers of elastic jobs
# connect to the rendezvous directly. What the program does is not part of it: reading a commit,
# and sending the state to newcomers.


def simulate_changes(noticed: Mapping[int, float], options: Namespace) -> list[Row]:
    """Simulates changes; `noticed`: seconds until all know of the loss, by the number of ranks before it."""
    costs = measure_costs()
    return [simulate_change(ranks, seconds, costs, options) for ranks, seconds in noticed.items()]


def simulate_change(ranks: int, noticed: float, costs: StartCosts, options: Namespace) -> Row:
    """Returns the moments, in seconds after the loss of a host, until which the last survivor has noticed the
    loss, has enlisted, has the description of the new world, and has ended its init(); and the bytes that the
    arbiter sends, and the rendezvous in the init().
    """
    left = ranks - options.each
    place = Place(options.each, options.latency * 1e-6, options.gigabits * 1e9 / 8, False)
    writing, reading, size = cost_of(describe_world(left, options.each))
    enlisted = noticed + left * costs.server_gather + place.latency
    sending = max(left * size / costs.stream, left * size / place.bandwidth)
    described = enlisted + left * writing + sending + reading + place.latency
    start = simulate_start(left, place, costs, describe(left, options.each))
    return {
        "ranks": ranks,
        "noticed": noticed,
        "enlisted": enlisted,
        "described": described,
        "started": described + start["seconds"],
        "bytes": left * size,
        "starts_sent": start["sent_by_server"],
    }


def describe_world(ranks: int, each: int) -> elastic_messages.World:
    """Returns what the arbiter sends to a member, when all can restore the commit."""
    slots = [f"host{rank // each}:{rank % each}" for rank in range(ranks)]
    return elastic_messages.World(
        generation=2,
        rank=0,
        slots=slots,
        workers=list(range(ranks)),
        initial=ranks + each,
        job="job/2/" + 64 * "0",
        address="10.0.0.1:40000",
        commit=17,
        current=list(range(ranks)),
        joined=0,
        text=f"{each} ranks were lost",
        elapsed=1_000_000,
    )


def cost_of(world: elastic_messages.World) -> tuple[float, float, int]:
    """Returns the seconds to write and to read a description of the world, and its bytes."""
    packed = elastic_messages.pack(world)
    writing = statistics.median(
        timed(lambda rank=rank: elastic_messages.pack(replace(world, rank=rank))) for rank in range(PACKED)
    )
    reading = statistics.median(timed(lambda: elastic_messages.unpack(packed)) for _ in range(PACKED))
    return writing, reading, len(packed.pack())


CHANGES: Columns = {
    "ranks": "{ranks:,}",
    "all know, s": "{noticed:,.2f}",
    "all are enlisted": "{enlisted:,.2f}",
    "all know the new world": "{described:,.2f}",
    "all have started": "{started:,.2f}",
    "arbiter sends, MiB": lambda row: f"{row['bytes'] / MIB:,.1f}",
    "rendezvous sends, MiB": lambda row: f"{row['starts_sent'] / MIB:,.0f}",
}
