"""The first links of a rank: it accepts the higher ranks while it connects to the lower ones."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.connection.address import listen_at
from sirtaki.bindings.bootstrap.connection.connect import connect
from sirtaki.bindings.bootstrap.job import Identity, Job, RendezvousError
from sirtaki.bindings.bootstrap.peer_listener import Handshakes, PeerListener
from sirtaki.bindings.bootstrap.world_builder import Connections, PeerEndpoint, choose, close_all, connect_all

JOB = Job("job", 3, b"k" * 32, "1.0")


def handshakes(rank: int) -> Handshakes:
    return Handshakes(JOB, Identity(rank, 1), time.monotonic() + FAILSAFE_SECONDS)


@contextlib.contextmanager
def first_rank(is_listening: bool) -> Iterator[tuple[str, socket.socket]]:
    """Returns the address of a rank that answers nobody, and its socket; it may not even listen yet."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if is_listening:
            mute.listen()
        yield f"127.0.0.1:{mute.getsockname()[1]}", mute


@pytest.mark.parametrize("is_listening", [True, False], ids=["answers late", "listens late"])
def test_a_rank_is_accepted_while_another_one_is_awaited(
    is_listening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sirtaki.bindings.bootstrap.connection.connect.HANDSHAKE_SECONDS", FAILSAFE_SECONDS)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))
        address, first = stack.enter_context(first_rank(is_listening))
        listener = stack.enter_context(PeerListener())
        connections: Connections = {}
        stack.callback(close_all, connections)
        peers = {0: PeerEndpoint("rank 0", [address]), 2: PeerEndpoint("rank 2", ["unused:1"])}
        linking = pool.submit(connect_all, listener, peers, handshakes(1), connections)

        mine = handshakes(2)
        accepted, peer = connect([listener.name], lambda to: mine.begin_handshake(to, 1), mine.deadline)
        stack.callback(accepted.close)
        choose(accepted)
        assert peer.rank == 1
        until = time.monotonic() + FAILSAFE_SECONDS
        while (2, 0) not in connections and time.monotonic() < until:
            time.sleep(0.01)
        assert (2, 0) in connections
        assert not linking.done()

        # Rank 0 answers at last, at the same address.
        first.close()
        with PeerListener() as late:
            late._listen(listen_at(address, b""))
            found: Connections = {}
            late.accept(handshakes(0), {(1, 0)}, found).finish()
            linking.result(FAILSAFE_SECONDS)
            close_all(found)
        assert set(connections) == {(0, 0), (2, 0)}


def test_a_rank_that_is_gone_ends_the_wait_for_others() -> None:
    with PeerListener() as gone:
        name = gone.name
    peers = {0: PeerEndpoint("rank 0", [name]), 2: PeerEndpoint("rank 2", ["unused:1"])}
    with PeerListener() as listener, pytest.raises(RendezvousError, match="rank 0 is gone"):
        connect_all(listener, peers, handshakes(1), {})
