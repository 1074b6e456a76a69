"""A rank's position among all ranks, and the memory that it shares with the ranks of its host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Peer(NamedTuple):
    """A rank's identification in messages; `host_index` numbers the hosts from 0."""

    host: str
    pid: int
    host_index: int


@dataclass(frozen=True)
class RankPlacement:
    """A rank's position: in the world, on its host, and among the ranks of all hosts with its local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Topology(RankPlacement):
    """A rank's position among identified peers, which are in the order of ranks."""

    peers: Sequence[Peer]

    def label(self, rank: int) -> str:
        """Returns the name of a rank in messages: "rank 1 (pid 4711 on hostA)"."""
        peer = self.peers[rank]
        return f"rank {rank} (pid {peer.pid} on {peer.host})"


@dataclass(frozen=True)
class SharedMemory:
    """The shared memory of a host's ranks, as `srt_memory`: all but the first three are by slot."""

    descriptor: int
    address: int
    slot: int
    ranks: Sequence[int]
    engine_doorbells: Sequence[int]
    waiter_doorbells: Sequence[int]
    process_descriptors: Sequence[int]
    socket_descriptors: Sequence[int]

    def as_struct(self) -> tuple[Any, list[Any]]:
        """Returns the `srt_memory`, and what has to stay alive as long as it is used."""
        from sirtaki.bindings.library import ffi  # opens the core, which hvdrun avoids

        arrays = {
            "ranks": self.ranks,
            "engine_doorbells": self.engine_doorbells,
            "waiter_doorbells": self.waiter_doorbells,
            "process_fds": self.process_descriptors,
            "socket_fds": self.socket_descriptors,
        }
        owned = {field: ffi.new("int32_t[]", list(values)) for field, values in arrays.items()}
        described = ffi.new("srt_memory *", owned)
        described.struct_size = ffi.sizeof("srt_memory")
        described.fd, described.address = self.descriptor, self.address
        described.slot, described.slot_count = self.slot, len(self.ranks)
        return described, list(owned.values())
