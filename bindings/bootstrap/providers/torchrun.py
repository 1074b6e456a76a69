"""Ranks that torchrun has started (https://docs.pytorch.org/docs/stable/elastic/run.html), or another
launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as Kubernetes' training operators do: then
rank 0 listens there.

With torchrun the address is that of its agent's store, through which rank 0 announces where it listens.
Anybody who reaches the store can read and write it. On one host it passes a key, too, and all ranks then
connect over Unix sockets to processes of the same user only. Over several hosts the user supplies the key.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Mapping
from typing import Any

from sirtaki.bindings.bootstrap.connection.address import join_address
from sirtaki.bindings.bootstrap.connection.key import KEY_ADVICE, KEY_BYTES
from sirtaki.bindings.bootstrap.job import Job, RendezvousError
from sirtaki.bindings.bootstrap.providers.world import (
    VERSION,
    World,
    key_from_store,
    key_of,
    local_address,
    number_in,
    served_by_rank_0,
    single_rank_world,
    start_timeout,
)


def find(environment: Mapping[str, str]) -> World | None:
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
    channel = _Channel(environment)
    key = own_key
    if not own_key:
        key = key_from_store(channel.broadcast("key", secrets.token_hex(KEY_BYTES) if rank == 0 else ""))

    def announce(address: str) -> str:
        announced = channel.broadcast("rendezvous", address)
        return announced if own_key else local_address(announced)

    address = f"unix:@sirtaki-{secrets.token_hex(8)}" if is_one_host else "*:0"
    job = Job(channel.name, size, key, VERSION, through_store=not own_key)
    return World(rank, job, address, start_timeout(environment), serves=rank == 0, announce=announce)


class _Channel:
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
