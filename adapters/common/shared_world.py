"""A world that Horovod's calls share with the process groups of torch.distributed.

The first of the two makes the world, and the other one uses it. A world that a process group has made ends
with the group, unless `hvd.init()` was called since.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sirtaki.bindings.bootstrap.job import WORKER
from sirtaki.bindings.context import Context, find
from sirtaki.bindings.errors import UnsupportedError

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.providers.stores import KeyValueStore


class SharedWorld:
    """The use of this process's world by a process group.

    Attributes:
        context: the rank.
    """

    def __init__(self, store: KeyValueStore, rank: int, size: int) -> None:
        """Uses the existing world; otherwise creates a world, together with the other ranks.

        The world is that of hvdrun if it has started this process, and consists of the ranks that share the
        store otherwise.

        Raises:
            ValueError: the world has another size, or this process is another rank of it.
            UnsupportedError: the ranks of the job may change.
            DeadlineError, InitializationError: the ranks could not form a world.
        """
        if WORKER in os.environ:
            raise UnsupportedError(
                "the ranks of an elastic job may change, but those of a process group cannot: start it "
                "without --min-np, or use hvd.elastic with Horovod's calls"
            )
        existing = find()
        self._is_own = existing is None
        self.context = existing if existing is not None else _enter(store, rank, size)
        if (self.context.rank, self.context.size) != (rank, size):
            message = (
                f"this process is rank {self.context.rank} of {self.context.size}, but it joins a process "
                f"group as rank {rank} of {size}: the default group consists of all ranks, with their numbers"
            )
            self.leave()
            raise ValueError(message)

    def leave(self) -> None:
        """Ends the use; ends the world if it has no other user. A second call does nothing."""
        from sirtaki.bindings.bootstrap import lifecycle

        if self._is_own and find() is self.context:
            lifecycle.leave_for_group()
        self._is_own = False


def own_addresses() -> list[str]:
    """Returns the addresses at which ranks of other hosts may reach this process."""
    from sirtaki.bindings.bootstrap.connection.address import chosen_interfaces, local_addresses

    return local_addresses(chosen_interfaces())


def _enter(store: KeyValueStore, rank: int, size: int) -> Context:
    from sirtaki.bindings.bootstrap import lifecycle
    from sirtaki.bindings.bootstrap.providers import environment, stores

    is_launched = "SIRTAKI_RENDEZVOUS" in os.environ

    def world() -> lifecycle.World:
        launched = environment.find(os.environ) if is_launched else None
        return launched or stores.world_of(store, rank, size, os.environ)

    return lifecycle.enter_for_group(world, counts=is_launched)
