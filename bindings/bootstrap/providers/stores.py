"""Ranks that share a key-value store, such as the store with which torch.distributed forms its groups.

Rank 0 writes to the store where its rendezvous listens. A store may let anybody read and write. On one host
rank 0 writes a random key, too, and all ranks then connect over Unix sockets to processes of the same user
only. Over several hosts the user supplies the key.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.address import join_address
from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.bindings.bootstrap.job import KEY_ADVICE, KEY_BYTES, Job, RendezvousError
from sirtaki.bindings.bootstrap.providers.world import (
    NOT_OF_RANK_0,
    World,
    key_from_store,
    key_of,
    local_address,
    number_in,
    served_by_rank_0,
    single_rank_world,
    start_timeout,
)
from sirtaki.bindings.bootstrap.world_builder import describe_process

_FIELDS = ("job", "address", "key", "refusal")


class KeyValueStore(Protocol):
    """The methods of a store that are used, as in torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None:
        """Writes a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Returns a value; waits until it has been written."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a number, which is 0 at first, and returns it."""
        ...


def world_of(store: KeyValueStore, rank: int, size: int, environment: Mapping[str, str]) -> World:
    """Returns the world of the ranks that share a store; all of them must call it, each with its rank.

    Raises:
        RendezvousError: the store does not answer, ranks on several hosts have no common key, or the store
            holds other values than those of rank 0.
    """
    if size == 1:
        return single_rank_world()
    try:
        channel = _Channel(store, rank)
        own_key = key_of(environment)
        agreed = channel.agree(size, bool(own_key))
    except RuntimeError as error:
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(f"the store of the process group does not answer: {error}") from None
    if agreed["refusal"]:
        raise RendezvousError(printable(agreed["refusal"], 1000))
    key = own_key or key_from_store(agreed["key"])
    job = Job(agreed["job"], size, key, VERSION, through_store=not own_key)

    def announce(address: str) -> str:
        announced = channel.broadcast_address(address)
        return announced if own_key else local_address(announced)

    address = agreed["address"] if own_key else local_address(agreed["address"])
    return World(rank, job, address, start_timeout(environment), serves=rank == 0, announce=announce)


class _Channel:
    """The keys of a store used by a collective init(): rank 0 writes values, the other ranks read."""

    def __init__(self, store: KeyValueStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._turn = store.add(f"sirtaki/turn/{rank}", 1)  # a store may serve several init() calls

    def agree(self, size: int, has_key: bool) -> dict[str, str]:
        """Returns what rank 0 has decided: the job's name, where to listen, and the key or a refusal."""
        self._store.set(self._name(f"host/{self._rank}"), describe_process("", {}).host)
        if self._rank > 0:
            return _read(self._store.get(self._name("agreed")))
        hosts = {self._store.get(self._name(f"host/{rank}")) for rank in range(size)}
        decided = _decide(len(hosts) == 1, has_key)
        self._store.set(self._name("agreed"), json.dumps(decided))
        return decided

    def broadcast_address(self, address: str) -> str:
        """Writes rank 0's address; returns it on every rank."""
        try:
            if self._rank == 0:
                self._store.set(self._name("address"), address)
                return address
            return self._store.get(self._name("address")).decode(errors="replace")
        except RuntimeError as error:
            raise RendezvousError(f"rank 0 has not written its address to the store: {error}") from None

    def _name(self, label: str) -> str:
        return f"sirtaki/{self._turn}/{label}"


def _decide(is_one_host: bool, has_key: bool) -> dict[str, str]:
    refusal, key = "", ""
    if not has_key and not is_one_host:
        refusal = f"the process group has ranks on several hosts, so they need a common key: {KEY_ADVICE}"
    elif not has_key:
        key = secrets.token_hex(KEY_BYTES)
    address = f"unix:@sirtaki-{secrets.token_hex(8)}" if is_one_host else "*:0"
    return {"job": f"store-{secrets.token_hex(8)}", "address": address, "key": key, "refusal": refusal}


def _read(text: bytes) -> dict[str, str]:
    """Returns the values of `_decide` that rank 0 has written. Raises RendezvousError for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not all(isinstance(values.get(name), str) for name in _FIELDS):
        raise RendezvousError(NOT_OF_RANK_0)
    return {name: values[name] for name in _FIELDS}


# ---- Ranks that torchrun has started (https://docs.pytorch.org/docs/stable/elastic/run.html), or another
# launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as Kubernetes' training operators do: then
# rank 0 listens there.
#
# With torchrun the address is that of its agent's store, through which rank 0 announces where it listens.
# Anybody who reaches the store can read and write it. On one host it passes a key, too, and all ranks then
# connect over Unix sockets to processes of the same user only. Over several hosts the user supplies the key.


def find_torchrun(environment: Mapping[str, str]) -> World | None:
    """Returns the world of torchrun; None if it has not started this process."""
    if not all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    rank, size = number_in(environment, "RANK"), number_in(environment, "WORLD_SIZE")
    if size == 1:
        return single_rank_world()
    if "TORCHELASTIC_RUN_ID" not in environment:
        address = join_address(environment["MASTER_ADDR"], number_in(environment, "MASTER_PORT"))
        return served_by_rank_0(rank, size, address, "master", environment)
    is_one_host = environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]
    own_key = key_of(environment)
    if not own_key and not is_one_host:
        raise RendezvousError(
            f"torchrun has started ranks on several hosts, so they need a common key: {KEY_ADVICE}"
        )
    channel = _TorchrunChannel(environment)
    key = own_key
    if not own_key:
        key = key_from_store(channel.broadcast("key", secrets.token_hex(KEY_BYTES) if rank == 0 else ""))

    def announce(address: str) -> str:
        announced = channel.broadcast("rendezvous", address)
        return announced if own_key else local_address(announced)

    address = f"unix:@sirtaki-{secrets.token_hex(8)}" if is_one_host else "*:0"
    job = Job(channel.name, size, key, VERSION, through_store=not own_key)
    return World(rank, job, address, start_timeout(environment), serves=rank == 0, announce=announce)


class _TorchrunChannel:
    """torchrun's store: rank 0 writes values to it, the other ranks read them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        from torch.distributed import TCPStore

        self._is_first = environment["RANK"] == "0"
        host, port = environment["MASTER_ADDR"], number_in(environment, "MASTER_PORT")
        timeout = datetime.timedelta(seconds=start_timeout(environment))
        try:
            self._store: Any = TCPStore(host, port, is_master=False, timeout=timeout)
            run = f"{environment['TORCHELASTIC_RUN_ID']}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            # Counts the init() calls of this rank.
            generation = self._store.add(f"sirtaki/{run}/turn/{environment['RANK']}", 1)
            self.name = f"torchrun-{run}.{generation}"
        except RuntimeError as error:
            raise RendezvousError(f"torchrun's store at {host}:{port} does not answer: {error}") from None

    def broadcast(self, label: str, text: str) -> str:
        """Writes a value on rank 0; returns rank 0's value on every rank."""
        name = f"sirtaki/{self.name}/{label}"
        if self._is_first:
            self._store.set(name, text)
            return text
        try:
            return bytes(self._store.get(name)).decode(errors="replace")
        except RuntimeError as error:
            raise RendezvousError(
                f"rank 0 has not written its address to torchrun's store: {error}"
            ) from None
