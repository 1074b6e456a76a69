"""The handler of an optimizer with shard=. Copies on other ranks keep a lost host from losing state.

At each commit, a rank stores its slices, and sends them to another rank, on another host if there is one.
After a change of the ranks, the slices of the commit are gathered from the ranks that have them, and divided
anew.

A commit is known by a random number of its world, and a counter. A loss may end a commit on some ranks only.
A rank that has completed the commit knows that all ranks have stored its copies; so a rank that has not
completed the commit keeps these copies until it completes a later one.

Before a change that the ranks have agreed on, each rank stores the slices of all ranks: any may leave.
"""

from __future__ import annotations

import pickle
import secrets
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common.ops.handles import run
from sirtaki.common.ops.objects import broadcast_object, gather_objects
from sirtaki.common.ops.requests import ALLGATHER, ALLREDUCE_IN_PLACE, COUNTED_ALLTOALL
from sirtaki.torch.elastic.optimizer_handler import OptimizerHandler, overwrite
from sirtaki.torch.ops.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.training.optimizer import drop_round
from sirtaki.torch.training.optimizer_state import options_of, set_options
from sirtaki.torch.training.sharded.optimizer import Sharded
from sirtaki.torch.training.sharded.slices import Place
from sirtaki.torch.training.sharded.whole_values import Elements, Part, described, whole_values

_ALIGNMENT = 64  # bytes: of each value in a payload
_LENGTH_BYTES = 8


class ShardedOptimizerHandler(OptimizerHandler):
    """A handler of an optimizer with shard=.

    Replicated are the parameters and the options. Each rank has its slices of the state; a commit sends
    copies of the slices to another rank.
    """

    value: Sharded

    def __init__(self, value: Sharded) -> None:
        super().__init__(value)
        self._copies = SliceCopies()

    def content(self) -> tuple[Any, Any]:
        return {"parameters": self.parameters()}, options_of(self.value)

    def load(self, replicas: Any, rest: Any) -> None:
        overwrite(self.parameters(), replicas["parameters"])
        set_options(self.value, rest)

    def land(self) -> None:
        self._copies.exchange(self.value.sharding_scope, self.value.place, self.value.parts())

    def save(self) -> None:
        super().save()
        self._copies.complete()

    def restore(self) -> None:
        super().restore()
        parts = self._copies.parts_at(self.value.place)
        if parts is not None:
            self.value.return_to(parts)

    def prepare_change(self) -> None:
        self._copies.spread(self.value.sharding_scope)

    def divide(self) -> None:
        scope = self.value.sharding_scope.derived("divide")
        if not any(gather_objects(scope.context, self.value.awaits_state, scope.name, scope.process_set)):
            return
        self.value.take_state(self._copies.whole_values(scope, self.parameters()))

    def drop_gradients(self) -> None:
        drop_round(self.value)
        super().drop_gradients()


# ---- The copies of slices ------------------------------------------------------------------------------


class CommitId(NamedTuple):
    """The identity of a commit: equal on all ranks of its world, and of no other commit."""

    world: int
    number: int


class SliceCopy(NamedTuple):
    """A rank's slices at a commit.

    Attributes:
        place: the rank's, in the world of the commit.
        payload: its parts, as `packed` returns them, in the memory of the host.
    """

    place: Place
    payload: Tensor


class SliceCopies:
    """The copies that this rank has: of its own slices, and of the slices of ranks that chose it.

    Attributes:
        committed: the commit that this rank has completed last; None before the first.
    """

    def __init__(self) -> None:
        self.committed: CommitId | None = None
        self._latest: CommitId | None = None  # that this rank may complete next
        self._copies: dict[CommitId, list[SliceCopy]] = {}
        self._world: weakref.ref[Context] | None = None
        self._world_number = 0

    def exchange(self, scope: CollectiveScope, place: Place, parts: Sequence[Part]) -> None:
        """Stores and sends this rank's slices, and returns once all ranks have. All ranks must call it.

        The first call only stores: programs make their states before the ranks exist.

        Raises:
            HorovodInternalError: a rank was lost; earlier copies are intact.
        """
        context, scope = scope.context, scope.derived("copies")
        own = packed(parts)
        copies = [SliceCopy(place, own)]
        if place.ranks == 1 or self.committed is None:
            commit = CommitId(secrets.randbits(62), 0)
            self._latest, self._copies[commit] = commit, copies
            return
        commit = self._next_commit(scope)
        copies += _from_others(scope, own)
        self._latest, self._copies[commit] = commit, copies
        all_have = torch.zeros(1)
        run(context, COLLECTIVES.single(context, ALLREDUCE_IN_PLACE, all_have, scope.options()))

    def complete(self) -> None:
        """Completes the commit of the last exchange: earlier copies are not needed any more."""
        self.committed = self._latest
        self._copies = {id_: copies for id_, copies in self._copies.items() if id_ == self.committed}

    def spread(self, scope: CollectiveScope) -> None:
        """Stores the slices of all ranks at the commit, as any of them may leave. All ranks must call it.

        The memory of the host needs room for the whole state on each rank.

        Raises:
            HorovodInternalError: a rank was lost; the copies are intact.
        """
        context, scope = scope.context, scope.derived("spread")
        if context.size == 1 or self.committed is None:
            return
        own = next(copy for copy in self._copies[self.committed] if copy.place.position == context.rank)
        sizes = gather_objects(context, own.payload.numel(), f"{scope.name}.sizes", scope.process_set)
        found = run(context, COLLECTIVES.single(context, ALLGATHER, own.payload, scope.options()))
        self._copies[self.committed] = [
            SliceCopy(Place(position, context.size), part) for position, part in enumerate(found.split(sizes))
        ]

    def parts_at(self, place: Place) -> list[Part] | None:
        """Returns the slices of a rank at the commit; None if they were cut for other ranks."""
        for copy in self._copies.get(self.committed, ()) if self.committed is not None else ():
            if copy.place == place:
                return unpacked(copy.payload)
        return None

    def whole_values(self, scope: CollectiveScope, parameters: Sequence[Tensor]) -> Iterator[dict[str, Any]]:
        """Gathers the state of each parameter at rank 0's commit. All ranks must exhaust it.

        Raises:
            HorovodInternalError: ranks were lost that had the only copies of a slice; on all ranks.
        """
        scope = scope.derived("commit")
        places = {id_: [copy.place for copy in copies] for id_, copies in self._copies.items()}
        facts = (self.committed, places)
        of_ranks = gather_objects(scope.context, facts, f"{scope.name}.copies", scope.process_set)
        commit, of_root = of_ranks[0]
        providers: dict[int, int] = {}  # by position: the first rank that has it
        for rank, (_, held) in enumerate(of_ranks):
            for place in held.get(commit, ()):
                providers.setdefault(place.position, rank)
        ranks = of_root[commit][0].ranks
        if missing := [position for position in range(ranks) if position not in providers]:
            raise HorovodInternalError(_lost(missing, ranks))
        mine = [
            unpacked(copy.payload)
            for copy in self._copies.get(commit, ())
            if providers[copy.place.position] == scope.context.rank
        ]
        return whole_values(scope, mine, parameters)

    def _next_commit(self, scope: CollectiveScope) -> CommitId:
        context = scope.context
        if self._world is None or self._world() is not context:
            number = broadcast_object(secrets.randbits(62), 0, f"{scope.name}.world", scope.process_set)
            self._world, self._world_number = weakref.ref(context), number
        return CommitId(self._world_number, context.next_number(f"{scope.name}.commit"))


def _lost(missing: Sequence[int], size: int) -> str:
    which = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return (
        f"the state of an optimizer with shard= was lost: the slices of {which} of {size} were on ranks that "
        "were lost together, each of which had the other's copies. Start again from a checkpoint that was "
        "made of hvd.full_state_dict(optimizer)"
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


def _from_others(scope: CollectiveScope, own: Tensor) -> list[SliceCopy]:
    """Sends this rank's slices to its keeper; returns the slices that other ranks have sent here."""
    context = scope.context
    splits = [0] * context.size
    hosts = [peer.host_index for peer in context.topology.peers]
    splits[keeper_of(context.rank, hosts)] = own.numel()
    options = scope.options()
    options.splits = splits
    received, counts = run(context, COLLECTIVES.single(context, COUNTED_ALLTOALL, own, options))
    parts = received.split(counts)
    return [SliceCopy(Place(rank, context.size), part) for rank, part in enumerate(parts) if part.numel()]


# ---- The parts of a rank as bytes: a length, a description, and the elements ---------------------------


@torch.no_grad()
def packed(parts: Sequence[Part]) -> Tensor:
    """Returns a copy of parts as bytes in the memory of the host, also on a rank without elements."""
    tensors = [tensor for part in parts for tensor in _elements(part)]
    sizes = [_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors]
    description = pickle.dumps(list(map(described, parts)))
    start = _aligned(_LENGTH_BYTES + len(description))
    payload = torch.zeros(start + sum(sizes), dtype=torch.uint8)
    head = len(description).to_bytes(_LENGTH_BYTES, "little") + description
    payload[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for tensor, size in zip(tensors, sizes, strict=True):
        target = payload[start : start + tensor.numel() * tensor.element_size()]
        target.view(tensor.dtype).copy_(tensor)
        start += size
    return payload


def unpacked(payload: Tensor) -> list[Part]:
    """Returns the parts in these bytes; their elements are views."""
    length = int.from_bytes(bytes(payload[:_LENGTH_BYTES].tolist()), "little")
    head = _LENGTH_BYTES + length
    parts: list[Part] = pickle.loads(payload[_LENGTH_BYTES:head].numpy().tobytes())
    start = _aligned(head)
    found = []
    for part in parts:
        values = {}
        for key, value in part.values.items():
            if isinstance(value, Elements):
                size = (part.end - part.begin) * value.dtype.itemsize
                values[key] = Elements(value.dtype, payload[start : start + size].view(value.dtype))
                start += _aligned(size)
            else:
                values[key] = value
        found.append(Part(part.begin, part.end, part.strides, values))
    return found


def _elements(part: Part) -> list[Tensor]:
    values = [value.tensor for value in part.values.values() if isinstance(value, Elements)]
    return [tensor for tensor in values if tensor is not None]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
