"""Copies of a rank's slices on another rank, so that no loss of a rank or a host loses divided state.

At each commit, a rank stores its slices, and sends them to another rank, on another host if there is one.
After a change of the ranks, the slices of the commit are gathered from the ranks that have them, and divided
anew.

A commit is known by a random number of its world, and a counter. A loss may end a commit on some ranks only.
A rank that has completed the commit knows that all ranks have stored its copies; so a rank that has not
completed the commit keeps these copies until it completes a later one.

Before a change that the ranks have agreed on, each rank stores the slices of all ranks: any may leave.

The slices of a rank are bytes here; the state of each framework makes them with `allocated`.
"""

from __future__ import annotations

import pickle
import secrets
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common.ops.objects import ByteTransport, broadcast_object, gather_objects
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.ops.requests import barrier
from sirtaki.common.training.groups import Place

_ALIGNMENT = 64  # bytes: of each value in a payload
_LENGTH_BYTES = 8


class CommitId(NamedTuple):
    """The identity of a commit: equal on all ranks of its world, and of no other commit."""

    world: int
    number: int


class SliceCopy(NamedTuple):
    """A rank's slices at a commit.

    Attributes:
        place: the rank's, in the world of the commit.
        payload: the slices, as `allocated` returns them, in the memory of the host.
    """

    place: Place
    payload: memoryview


class SliceCopies:
    """The copies that this rank has: of its own slices, and of the slices of ranks that chose it.

    Attributes:
        committed: the commit that this rank has completed last; None before the first.
    """

    def __init__(self, remedy: str) -> None:
        """Creates it, without copies. `remedy` says how a program saves what would survive any loss."""
        self.committed: CommitId | None = None
        self._remedy = remedy
        self._latest: CommitId | None = None  # that this rank may complete next
        self._copies: dict[CommitId, list[SliceCopy]] = {}
        self._world: weakref.ref[Context] | None = None
        self._world_number = 0

    def exchange(self, context: Context, name: str, place: Place, payload: memoryview) -> None:
        """Stores and sends this rank's slices, and returns once all ranks have. All ranks must call it.

        The first call only stores: programs make their states before the ranks exist.

        Args:
            context: this rank.
            name: the prefix of the names of the operations; another one for each divided object.
            place: this rank's, for which the slices have been cut.
            payload: the slices.

        Raises:
            HorovodInternalError: a rank was lost; earlier copies are intact.
        """
        copies = [SliceCopy(place, payload)]
        if place.ranks == 1 or self.committed is None:
            commit = CommitId(secrets.randbits(62), 0)
            self._latest, self._copies[commit] = commit, copies
            return
        commit = self._next_commit(context, f"{name}.copies")
        copies += _from_others(context, f"{name}.copies", payload)
        self._latest, self._copies[commit] = commit, copies
        barrier(name=f"{name}.copies.stored")

    def complete(self) -> None:
        """Completes the commit of the last exchange: earlier copies are not needed any more."""
        self.committed = self._latest
        self._copies = {id_: copies for id_, copies in self._copies.items() if id_ == self.committed}

    def spread(self, context: Context, name: str) -> None:
        """Stores the slices of all ranks at the commit, as any of them may leave. All ranks must call it.

        The memory of the host needs room for the whole state on each rank.

        Raises:
            HorovodInternalError: a rank was lost; the copies are intact.
        """
        if context.size == 1 or self.committed is None:
            return
        own = next(copy for copy in self._copies[self.committed] if copy.place.position == context.rank)
        sizes = gather_objects(context, len(own.payload), f"{name}.spread.sizes", global_process_set)
        found = ByteTransport(context, f"{name}.spread", global_process_set).gather(own.payload, "slices")
        self._copies[self.committed] = [
            SliceCopy(Place(position, context.size), part)
            for position, part in enumerate(_parts(found, sizes))
        ]

    def payload_at(self, place: Place) -> memoryview | None:
        """Returns the slices of a rank at the commit; None if they were cut for other ranks."""
        for copy in self._copies.get(self.committed, ()) if self.committed is not None else ():
            if copy.place == place:
                return copy.payload
        return None

    def provided(self, context: Context, name: str) -> list[memoryview]:
        """Returns the slices of rank 0's commit that this rank contributes. All ranks must call it.

        The contributions of all ranks together have the slices of each rank of that commit once.

        Raises:
            HorovodInternalError: ranks were lost that had the only copies of a slice; on all ranks.
        """
        places = {id_: [copy.place for copy in copies] for id_, copies in self._copies.items()}
        of_ranks = gather_objects(context, (self.committed, places), f"{name}.commit", global_process_set)
        commit, of_root = of_ranks[0]
        providers: dict[int, int] = {}  # by position: the first rank that has it
        for rank, (_, held) in enumerate(of_ranks):
            for place in held.get(commit, ()):
                providers.setdefault(place.position, rank)
        ranks = of_root[commit][0].ranks
        if missing := [position for position in range(ranks) if position not in providers]:
            raise HorovodInternalError(_lost(missing, ranks, self._remedy))
        return [
            copy.payload
            for copy in self._copies.get(commit, ())
            if providers[copy.place.position] == context.rank
        ]

    def _next_commit(self, context: Context, name: str) -> CommitId:
        if self._world is None or self._world() is not context:
            number = broadcast_object(secrets.randbits(62), 0, f"{name}.world")
            self._world, self._world_number = weakref.ref(context), number
        return CommitId(self._world_number, context.next_number(f"{name}.commit"))


def _lost(missing: Sequence[int], size: int, remedy: str) -> str:
    which = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return (
        f"the state of an optimizer with shard= was lost: the slices of {which} of {size} were on ranks that "
        "were lost together, each of which had the other's copies. Start again from a checkpoint that was "
        f"made of {remedy}"
    )


def keeper_of(rank: int, hosts: Sequence[int]) -> int:
    """Returns the rank that keeps copies of a rank's slices: on the next host, or else the next rank.

    `hosts` are the numbers of the ranks' hosts.
    """
    numbers = list(dict.fromkeys(hosts))
    own, following = (
        [other for other, host in enumerate(hosts) if host == wanted]
        for wanted in (hosts[rank], numbers[(numbers.index(hosts[rank]) + 1) % len(numbers)])
    )
    return following[(own.index(rank) + (len(numbers) == 1)) % len(following)]


def _from_others(context: Context, name: str, own: memoryview) -> list[SliceCopy]:
    """Sends this rank's slices to its keeper; returns the slices that other ranks have sent here."""
    splits = [0] * context.size
    hosts = [peer.host_index for peer in context.topology.peers]
    splits[keeper_of(context.rank, hosts)] = len(own)
    received, sizes = ByteTransport(context, name, global_process_set).exchange(own, splits, "slices")
    parts = enumerate(_parts(received, sizes))
    return [SliceCopy(Place(rank, context.size), part) for rank, part in parts if len(part)]


def _parts(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


# ---- A payload: a length, a pickled description with the sizes of the values, and the values -----------


def allocated(description: Any, sizes: Sequence[int]) -> tuple[memoryview, list[memoryview]]:
    """Returns a payload, and the memory of its values, which the caller fills.

    Args:
        description: can be pickled; `opened` returns it.
        sizes: bytes of each value.
    """
    head = pickle.dumps((description, list(sizes)))
    start = _aligned(_LENGTH_BYTES + len(head))
    payload = memoryview(bytearray(start + sum(map(_aligned, sizes))))
    payload[:_LENGTH_BYTES] = len(head).to_bytes(_LENGTH_BYTES, "little")
    payload[_LENGTH_BYTES : _LENGTH_BYTES + len(head)] = head
    return payload, _values(payload, start, sizes)


def opened(payload: memoryview) -> tuple[Any, list[memoryview]]:
    """Returns the description and the memory of the values in a payload."""
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "little")
    description, sizes = pickle.loads(payload[_LENGTH_BYTES:end])
    return description, _values(payload, _aligned(end), sizes)


def _values(payload: memoryview, start: int, sizes: Sequence[int]) -> list[memoryview]:
    places = _parts(payload[start:], [_aligned(size) for size in sizes])
    return [place[:size] for place, size in zip(places, sizes, strict=True)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
