"""Requests of a process group, queued as one work: the base of all kinds of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from sirtaki.bindings.context import Context
from sirtaki.bindings.request import CPU, QUEUE_SAME_NAME, Batch
from sirtaki.common.ops import NO_REDUCTION, Call, Reduction, describe
from sirtaki.common.tensor import TensorView
from sirtaki.torch import device
from sirtaki.torch.backend.member_sets import set_of
from sirtaki.torch.backend.names import Names, Series
from sirtaki.torch.backend.stream_work import StreamWork
from sirtaki.torch.backend.tensors import joined
from sirtaki.torch.backend.work import GroupWork


def _nothing(context: Context, batch: Batch, index: int) -> None:
    """Stores no result."""


@dataclass(slots=True)
class Part:
    """One request of a work.

    Attributes:
        kind: the core's.
        view: the memory that is read; a receiver's is overwritten.
        target: the address that is written; 0: the core allocates the result, or there is none.
        store: puts the result of the request with this index in place.
        how: the combination, of those that combine.
        root: the rank of the world that sends: of a broadcast or a message.
        destination: the rank of the world that receives a message.
        splits: an all-to-all's rows for each member of the process set.
        keep: further objects that stay alive until it has ended.
        room: bytes at the target, of kinds whose results the core allocates if they have another size.
    """

    kind: int
    view: TensorView
    target: int = 0
    store: Callable[[Context, Batch, int], None] = _nothing
    how: Reduction = NO_REDUCTION
    root: int = 0
    destination: int = 0
    splits: Sequence[int] | None = None
    keep: Any = None
    room: int = 0


# Without its annotations: they describe overloads, of which torch makes the calls that are overridden here.
_ProcessGroup: Any = ProcessGroup


class Submission(_ProcessGroup):
    """A process group that queues requests. The kinds of operations derive from it.

    Attributes:
        context: this process's rank in the world.
        members: the ranks of the world that belong to the group, by their rank in the group.
        order: their order, beside that of the core's process set.
        names: the names of its operations.
        timeout: the limit of a wait that has none of its own.
        collected: the works of calls that are waited for as one; None: each is waited for by itself.
    """

    def __init__(self, context: Context, members: Sequence[int], timeout: timedelta) -> None:
        """Creates a group of some of the ranks, in any order."""
        super().__init__(members.index(context.rank), len(members))
        self.context, self.members = context, list(members)
        self.order = RankOrder(self.members)
        self.names = Names(context, self.members)
        self.timeout = timeout
        self.collected: list[GroupWork] | None = None
        self._process_set = set_of(context, self.order.ascending)

    def submit(
        self,
        series: Series,
        parts: Sequence[Part],
        results: Sequence[Tensor],
        opts: Any = None,
        suffix: str = "",
    ) -> GroupWork:
        """Queues the requests of an operation, which writes to the tensors `results`, under the next name.

        If the options of the call say that its caller waits at once, and not for several calls together,
        this waits for a while: a thread that drives the engine by itself saves the engine's thread from being
        woken.

        Raises:
            ValueError: the core has refused one; none is queued.
            DeadlineError: not all members have created the group.
        """
        number = self._process_set.number(self.timeout)
        batch = _described(series.take(suffix), number, parts)
        waits_at_once = self.collected is None and not getattr(opts, "asyncOp", True)
        try:
            if parts and batch.gpu == CPU and waits_at_once:
                self.context.begin(batch)
            elif parts:
                self.context.enqueue(batch)
        except BaseException:
            if not any(batch.handles):
                series.give_back()  # the ranks still agree about the number of operations
            raise
        stores = [part.store for part in parts]

        def store(context: Context, batch: Batch) -> None:
            for index, store_one in enumerate(stores):
                store_one(context, batch, index)

        kind = GroupWork if batch.gpu == CPU else StreamWork
        work = kind(self.context, batch, store, results, self.timeout)
        if self.collected is not None:
            self.collected.append(work)
        return work


def _described(name: str, process_set: int, parts: Sequence[Part]) -> Batch:
    """Returns the requests of an operation, ready to be queued."""
    batch = Batch(len(parts))
    for index, part in enumerate(parts):
        call = Call(name if len(parts) == 1 else f"{name}.{index}", process_set)
        describe(
            batch,
            part.kind,
            part.view,
            part.target,
            call,
            index,
            how=part.how,
            root=part.root,
            destination=part.destination,
            splits=part.splits,
        )
        batch.set_flags(index, QUEUE_SAME_NAME)
        batch.offer_memory(index, part.room)
        batch.keepalive[index] = (part.view.owner, part.keep, part.store)
    if batch.gpu != CPU:
        batch.set_all_streams([device.current_stream(batch.gpu)] * batch.count)
    return batch


# ---- The order of a group's ranks ----------------------------------------------------------------------

# The caller chooses it; process sets of the core are in ascending order.


Given = TypeVar("Given")


class RankOrder:
    """The ranks of a group by their position in the group, and by their position in its process set.

    Attributes:
        ascending: the ranks of the world that belong to the group, as in its process set.
        is_ascending: whether the group has the same order.
    """

    def __init__(self, members: Sequence[int]) -> None:
        """Takes the ranks of the world, in the group's order."""
        self.ascending = sorted(members)
        self.is_ascending = self.ascending == list(members)
        rank_in_group = {member: rank for rank, member in enumerate(members)}
        place_in_set = {member: place for place, member in enumerate(self.ascending)}
        self._ranks = [rank_in_group[member] for member in self.ascending]
        self._places = [place_in_set[member] for member in members]

    def to_set(self, by_rank: Sequence[Given]) -> Sequence[Given]:
        """Puts one value for each rank of the group into the order of the process set."""
        return by_rank if self.is_ascending else [by_rank[rank] for rank in self._ranks]

    def parts_to_set(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """Puts a tensor's parts, of `counts` elements for each rank of the group, into the set's order."""
        return joined(self.to_set(tensor.detach().reshape(-1).split(list(counts))))

    def parts_from_set(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """Reverts `parts_to_set`; the counts are for each rank of the group here, too."""
        parts = tensor.reshape(-1).split(list(self.to_set(counts)))
        return joined([parts[place] for place in self._places])
