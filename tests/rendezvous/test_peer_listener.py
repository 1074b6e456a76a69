"""Wanted ranks are accepted, whatever unauthenticated peers do meanwhile."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.connection.address import (
    is_abstract,
    is_loopback,
    local_addresses,
    split_address,
    unix_path,
)
from sirtaki.bindings.bootstrap.connection.connect import connect
from sirtaki.bindings.bootstrap.connection.encryption import Connection
from sirtaki.bindings.bootstrap.connection.handshake import (
    CHOSEN,
    HandshakeConnection,
    handshake_steps,
    is_trusted_user,
)
from sirtaki.bindings.bootstrap.job import Identity, Job, LinkKind, RendezvousError, RendezvousTimeout, Role
from sirtaki.bindings.bootstrap.peer_listener import Handshakes, LinkKey, PeerListener
from sirtaki.bindings.bootstrap.world_builder import choose

JOB = Job("job", 4, b"k" * 32, "1.0")


def handshakes(
    rank: int, job: Job = JOB, seconds: float = FAILSAFE_SECONDS, generation: int = 1
) -> Handshakes:
    return Handshakes(job, Identity(rank, generation), time.monotonic() + seconds)


@pytest.fixture
def listener() -> Iterator[PeerListener]:
    with PeerListener() as one:
        yield one


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as one:
        yield one


def accept(
    listener: PeerListener, handshakes: Handshakes, wanted: set[LinkKey]
) -> dict[LinkKey, socket.socket]:
    found: dict[LinkKey, socket.socket] = {}
    listener.accept(handshakes, wanted, found).finish()
    return found


def come(addresses: list[str], mine: Handshakes, channel: int = 0) -> socket.socket:
    connection, _ = connect(addresses, lambda to: mine.begin_handshake(to, 0, channel), mine.deadline)
    choose(connection)
    assert isinstance(connection, socket.socket)
    return connection


def test_ranks_come_through_both_doors(listener: PeerListener, pool: ThreadPoolExecutor) -> None:
    far = listener.listen_to_hosts([], JOB)
    wanted: set[LinkKey] = {(1, 0), (2, 0), (2, 1)}
    accepted = pool.submit(accept, listener, handshakes(0), wanted)
    came = [
        pool.submit(come, [listener.name], handshakes(1)),
        pool.submit(come, far, handshakes(2)),
        pool.submit(come, far, handshakes(2), 1),
    ]
    ours = accepted.result(FAILSAFE_SECONDS)
    theirs = dict(zip([(1, 0), (2, 0), (2, 1)], [one.result(FAILSAFE_SECONDS) for one in came], strict=True))
    assert ours.keys() == wanted
    for place, connection in ours.items():
        connection.sendall(repr(place).encode())
        assert theirs[place].recv(100) == repr(place).encode()
        connection.close()
        theirs[place].close()


def test_what_follows_the_handshake_is_left_in_the_socket(
    listener: PeerListener, pool: ThreadPoolExecutor
) -> None:
    def come_and_speak() -> socket.socket:
        connection = come([listener.name], handshakes(1))
        connection.sendall(b"first words")
        return connection

    came = pool.submit(come_and_speak)
    connection = accept(listener, handshakes(0), {(1, 0)})[1, 0]
    assert connection.recv(100) == b"first words"
    connection.close()
    came.result(FAILSAFE_SECONDS).close()


def test_strangers_are_turned_away_and_nobody_waits_for_them(
    listener: PeerListener, pool: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    far = listener.listen_to_hosts([], JOB)
    place = split_address(far[0])
    silent = [socket.create_connection(place, FAILSAFE_SECONDS) for _ in range(20)]
    rude = socket.create_connection(place, FAILSAFE_SECONDS)
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
    others = [replace(JOB, key=b"x" * 32), replace(JOB, id="another"), replace(JOB, version="2.0")]

    def come_in_vain(job: Job) -> None:
        with suppress(RendezvousError):
            come(far, handshakes(1, job)).close()

    def come_from_another_generation() -> None:
        with pytest.raises(RendezvousError, match="rank 0 is at its init number 1, but rank 1 at number 2"):
            come(far, handshakes(1, generation=2))

    def come_all() -> socket.socket:
        for job in others:
            come_in_vain(job)
        come_from_another_generation()
        come(far, handshakes(3)).close()  # a rank that is not wanted
        return come(far, handshakes(1))

    came = pool.submit(come_all)
    connection = accept(listener, handshakes(0), {(1, 0)})[1, 0]
    with came.result(FAILSAFE_SECONDS) as theirs, connection:
        connection.sendall(b"well")
        assert theirs.recv(10) == b"well"
    said = capsys.readouterr().err
    for words in ("is not a process of sirtaki", "does not know the key", "another job", "sirtaki 2.0"):
        assert words in said, said
    assert f"refused a connection from {place[0]} port" in said
    for one in [*silent, rude]:
        one.close()


class Everybody:
    """Takes every connection."""

    def __init__(self) -> None:
        self.taken: list[LinkKey] = []

    def wants(self, key: LinkKey) -> bool:
        return True

    def take(self, key: LinkKey, connection: Connection) -> None:
        connection.close()
        self.taken.append(key)


@pytest.mark.parametrize("chooses", [False, True])
def test_a_connection_is_taken_when_its_rank_has_chosen_it(listener: PeerListener, chooses: bool) -> None:
    """A rank may close one whose handshake is complete: another address was faster, or it has given up."""

    def poll() -> bool:
        listener.poll(handshakes(0), everybody, 0.05)
        return any(isinstance(key.data, HandshakeConnection) for key in listener._selector.get_map().values())

    def answer(wanted: int) -> bytes:
        received = b""
        while len(received) < wanted:
            poll()
            with suppress(BlockingIOError):
                received += connection.recv(wanted - len(received))
        return received

    everybody = Everybody()
    place = split_address(listener.listen_to_hosts([], JOB)[0])
    with socket.create_connection(place, FAILSAFE_SECONDS) as connection:
        steps = handshakes(1).begin_handshake(connection, 0)
        hello, hello_bytes = next(steps)
        connection.setblocking(False)
        connection.sendall(hello)
        proof, proof_bytes = steps.send(answer(hello_bytes))
        connection.sendall(proof)
        answer(proof_bytes)
        assert poll()
        assert everybody.taken == []
        if chooses:
            connection.sendall(CHOSEN)
        else:
            connection.close()
        while poll():
            pass
    assert everybody.taken == ([(1, 0)] if chooses else [])


def test_who_does_not_come_is_named(listener: PeerListener) -> None:
    with pytest.raises(RendezvousTimeout, match="no connection came from ranks 1 and 3 in time"):
        accept(listener, handshakes(0, seconds=0.2), {(1, 0), (3, 0), (3, 1)})


def test_a_crowd_of_strangers(listener: PeerListener, pool: ThreadPoolExecutor) -> None:
    def crowd() -> None:
        for _ in range(300):
            with socket.socket(socket.AF_UNIX) as one, suppress(OSError):
                one.settimeout(FAILSAFE_SECONDS)
                one.connect(unix_path(listener.name))
                strangers.append(one.dup())

    strangers: list[socket.socket] = []
    thread = threading.Thread(target=crowd)
    thread.start()
    came = pool.submit(come, [listener.name], handshakes(1))
    accept(listener, handshakes(0), {(1, 0)})[1, 0].close()
    came.result(FAILSAFE_SECONDS).close()
    thread.join(FAILSAFE_SECONDS)
    for one in strangers:
        one.close()


def test_other_hosts_are_offered_no_loopback(listener: PeerListener) -> None:
    offered = [split_address(address)[0] for address in listener.listen_to_hosts([], JOB)]
    if local_addresses():
        assert offered
        assert not any(is_loopback(host) for host in offered)
    route = local_addresses()[-1:]
    offered = [split_address(address)[0] for address in listener.listen_to_hosts(route, JOB)]
    assert offered[:1] == (route or ["127.0.0.1"])


def test_interfaces_that_do_not_exist() -> None:
    with pytest.raises(RendezvousError, match=r"no network interface 'nonsense0' on .*: there are .*lo"):
        local_addresses(["nonsense0"])


def test_a_private_folder_holds_the_socket(pool: ThreadPoolExecutor) -> None:
    """Another user cannot even fill the queue of connections, which an abstract socket would allow."""
    with tempfile.TemporaryDirectory() as folder:
        with PeerListener(folder) as listener:
            assert listener.name.startswith(f"unix:{folder}/")
            came = pool.submit(come, [listener.name], handshakes(1))
            accept(listener, handshakes(0), {(1, 0)})[1, 0].close()
            came.result(FAILSAFE_SECONDS).close()
        assert os.listdir(folder) == []


@pytest.mark.parametrize("folder", ["", "/no/such/folder", "/" + "x" * 120])
def test_without_a_usable_folder_the_socket_has_no_file(folder: str, pool: ThreadPoolExecutor) -> None:
    with PeerListener(folder) as listener:
        assert is_abstract(listener.name)
        came = pool.submit(come, [listener.name], handshakes(1))
        accept(listener, handshakes(0), {(1, 0)})[1, 0].close()
        came.result(FAILSAFE_SECONDS).close()


def test_what_comes_along_with_the_proof_is_left_in_the_socket() -> None:
    near, far = socket.socketpair()
    ours = handshake_steps(JOB, Identity(0, 1), LinkKind.PEERS, Role.ACCEPTS)
    theirs = handshake_steps(JOB, Identity(1, 1), LinkKind.PEERS, Role.CONNECTS)
    with near, far:
        arrival = HandshakeConnection(near, ours, time.monotonic() + FAILSAFE_SECONDS)
        hello, length = next(theirs)
        far.sendall(hello)
        arrival.send()
        for data in (theirs.send(far.recv(length))[0], b""):
            arrival.receive()
            arrival.authenticate()
            far.sendall(data and data + b"for the core")
        assert arrival.peer == Identity(1, 1)
        assert near.recv(100) == b"for the core"


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (Identity(2, 1), "rank 2 answers where rank 1 should be"),
        (Identity(1, 2), "rank 1 is at its init number 2, but rank 0 at number 1"),
    ],
)
def test_whoever_answers_has_to_be_the_rank_that_is_wanted(peer: Identity, words: str) -> None:
    near, far = socket.socketpair()
    with near, far:
        ours = handshakes(0).begin_handshake(near, 1)
        theirs = handshake_steps(JOB, peer, LinkKind.PEERS, Role.ACCEPTS)
        hello, _ = next(ours)
        their_hello, _ = next(theirs)
        proof, _ = ours.send(their_hello)
        theirs.send(hello)
        with pytest.raises(RendezvousError, match=words):
            ours.send(theirs.send(proof)[0])


def test_only_the_same_user_or_root_comes_through_a_unix_socket() -> None:
    class Connection(socket.socket):
        user = 0

        def getsockopt(self, *_: int) -> bytes:  # type: ignore[override]
            return struct.pack("3i", 1, self.user, 0)

    with Connection() as connection:
        for user, is_welcome in ((os.getuid(), True), (0, True), (os.getuid() + 4242, False)):
            connection.user = user
            assert is_trusted_user(connection) == is_welcome
