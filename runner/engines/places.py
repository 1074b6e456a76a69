"""The ranks of an engine's processes, and the rendezvous, which the driver or a process serves."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.address import chosen_interfaces
from sirtaki.bindings.bootstrap.job import KEY_BYTES, Job
from sirtaki.bindings.bootstrap.lifecycle import encrypted, print_rejections
from sirtaki.bindings.bootstrap.providers.world import World, single_rank_world
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.runner.launch.environment import encrypts


@dataclass(frozen=True)
class EngineJob:
    """The properties of a job that its driver decides, and sends to all processes by the engine's channel.

    Attributes:
        id: random, not secret.
        size: the number of ranks.
        key: secret.
        start_timeout: seconds that a rank waits in init() for the others.
        is_local: whether all processes are on the driver's host.
    """

    id: str
    size: int
    key: bytes = field(repr=False)
    start_timeout: float
    is_local: bool = False

    @classmethod
    def create(cls, engine: str, size: int, start_timeout: float, is_local: bool = False) -> EngineJob:
        """Returns a new job with a key of its own."""
        name = f"{engine}-{secrets.token_hex(8)}"
        return cls(name, size, secrets.token_bytes(KEY_BYTES), start_timeout, is_local)

    def serve(self) -> RendezvousServer:
        """Starts the rendezvous in this process, with the settings of its environment."""
        job = self._described()
        if encrypts(os.environ):
            job = encrypted(job)
        address = f"unix:@sirtaki-{secrets.token_hex(8)}" + ",*:0" * (not self.is_local)
        interfaces = chosen_interfaces()
        return RendezvousServer(address, job, self.start_timeout, print_rejections, interfaces).start()

    def world(self, rank: int, address: str) -> World:
        """Returns the world of a rank; `address` is that of the rendezvous."""
        if self.size == 1:
            return single_rank_world()
        return World(rank, self._described(), address, self.start_timeout)

    def _described(self) -> Job:
        return Job(self.id, self.size, self.key, VERSION)


def ranks_by_host(hosts: Sequence[str]) -> list[int]:
    """Returns the rank of each process, given its host: hosts follow each other as they appear first.

    The first process is rank 0, and the ranks of a host are contiguous, in the order of its processes.
    """
    order = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    by_rank = sorted(range(len(hosts)), key=lambda process: (order[hosts[process]], process))
    ranks = [0] * len(hosts)
    for rank, process in enumerate(by_rank):
        ranks[process] = rank
    return ranks
