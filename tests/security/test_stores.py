"""Stores through which ranks meet, and to which other processes can write: torchrun's, a process group's."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sirtaki.bindings.bootstrap.connection.address import require_key
from sirtaki.bindings.bootstrap.job import Identity, Job, RendezvousError, write_key
from sirtaki.bindings.bootstrap.peer_listener import PeerListener
from sirtaki.bindings.bootstrap.providers import find_world, stores
from sirtaki.bindings.bootstrap.providers.world import World
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient

OURS = "unix:@sirtaki-of-rank-0"
FOREIGN = ["192.0.2.2:39797", "127.0.0.1:39797", f"{OURS},192.0.2.2:39797", "unix:/tmp/of-another-user", ""]
LISTENING = Job("store", 2, b"k" * 32, "1.0", through_store=True)


class Store:
    """A store of torch.distributed, and a process that overwrites each value of rank 0."""

    def __init__(self, forge: Callable[[str, str], str] = lambda _, value: value) -> None:
        self.forge = forge
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, name: str, value: str) -> None:
        with self._changed:
            self._values[name] = self.forge(name, value)
            self._changed.notify_all()

    def get(self, name: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: name in self._values)
            return self._values[name].encode()

    def add(self, name: str, amount: int) -> int:
        with self._changed:
            self._values[name] = str(int(self._values.get(name, "0")) + amount)
            return int(self._values[name])


@pytest.fixture(params=["torchrun", "process group"])
def meet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that returns the world of each of two ranks, or its error."""

    def of_torchrun(store: Store, rank: int, settings: Mapping[str, str]) -> World:
        return find_world(
            environment={
                "TORCHELASTIC_RUN_ID": "none",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "1",
                **settings,
            }
        )

    def of_group(store: Store, rank: int, settings: Mapping[str, str]) -> World:
        return stores.world_of(store, rank, 2, settings)

    def both(store: Store, settings: Mapping[str, str] | None = None) -> list[World | RendezvousError]:
        monkeypatch.setattr("torch.distributed.TCPStore", lambda *_, **__: store)
        world_of = of_torchrun if request.param == "torchrun" else of_group
        results: list[World | RendezvousError] = []
        for rank in range(2):  # rank 1 reads what rank 0 has written
            if rank == 1 and isinstance(results[0], World) and results[0].announce is not None:
                results[0].announce(OURS)
            try:
                if request.param != "torchrun" and rank == 0:
                    store.set("sirtaki/1/host/1", _host())
                world = world_of(store, rank, settings or {})
                if rank == 1 and world.announce is not None:
                    world = replace(world, address=world.announce(""))
                results.append(world)
            except RendezvousError as error:
                results.append(error)
        return results

    return both


def _host() -> str:
    from sirtaki.bindings.bootstrap.world_builder import describe_process

    return describe_process("", {}).host


def test_two_ranks_meet_over_a_unix_socket(meet: Any) -> None:
    first, second = meet(Store())
    assert first.job == second.job
    assert first.job.through_store
    assert second.address == OURS


@pytest.mark.parametrize("address", FOREIGN)
def test_an_address_that_rank_0_cannot_have_written_is_refused(meet: Any, address: str) -> None:
    def forge(name: str, value: str) -> str:
        if name.endswith("/agreed"):
            return json.dumps({**json.loads(value), "address": address})
        return address if name.endswith(("/address", "/rendezvous")) else value

    _, second = meet(Store(forge))
    assert isinstance(second, RendezvousError)
    assert "another process can write to it" in str(second)
    assert "SIRTAKI_KEY_FILE=key" in str(second)


@pytest.mark.parametrize("value", ["", "{", "[]", '{"job": 3}', "k" * 64, "\0" * 100])
def test_values_that_are_none(meet: Any, value: str) -> None:
    _, second = meet(Store(lambda name, kept: value if name.endswith(("/agreed", "/key")) else kept))
    assert isinstance(second, RendezvousError)
    assert "another process can write to it" in str(second)


def test_a_users_key_authenticates_whoever_answers(meet: Any, tmp_path: Path) -> None:
    """With a key of the user's the address may be another host's: the handshake proves who answers there."""
    key = write_key(str(tmp_path / "key"))
    there = "192.0.2.2:39797"
    forged = Store(lambda name, value: there if name.endswith(("/address", "/rendezvous")) else value)
    _, second = meet(forged, {"SIRTAKI_KEY_FILE": str(tmp_path / "key")})
    assert second.address == there
    assert second.job.key == key
    assert not second.job.through_store


def test_a_key_from_a_store_opens_no_tcp_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as connection:
        connection.connect(server.getsockname())
        with pytest.raises(RendezvousError, match=r"Unix sockets only, not to 127\.0\.0\.1"):
            require_key(connection, LISTENING)
        require_key(connection, replace(LISTENING, through_store=False))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RendezvousError, match="Unix sockets only"):
            RendezvousClient.connect(address, LISTENING, Identity(1), 5)


def test_a_key_from_a_store_listens_at_no_port() -> None:
    with PeerListener() as listener, pytest.raises(RendezvousError, match="need a common key"):
        listener.listen_to_hosts([], LISTENING)


def test_a_socket_of_another_user_is_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"\0sirtaki-test-{os.getpid()}"
    ready, listens = os.pipe()
    if (child := os.fork()) == 0:  # root's sockets are trusted: the server belongs to nobody
        if os.getuid() == 0:
            os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            server.listen()
            os.write(listens, b"1")
            server.settimeout(60)
            connection, _ = server.accept()
            connection.settimeout(60)
            os._exit(0 if connection.recv(1) == b"" else 1)
    try:
        if os.getuid() != 0:
            monkeypatch.setattr(os, "getuid", lambda: 4242)
        assert os.read(ready, 1) == b"1"
        with pytest.raises(RendezvousError, match="another user's process answers"):
            RendezvousClient.connect(f"unix:@{name[1:]}", LISTENING, Identity(1), 60)
    finally:
        _, status = os.waitpid(child, 0)
        os.close(ready)
        os.close(listens)
    assert os.waitstatus_to_exitcode(status) == 0, "the rank has sent something before it looked at the user"
