"""Requests of a process group, submitted as a single work: the base of all kinds of operations."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import DeadlineError
from sirtaki.bindings.request import CPU, QUEUE_SAME_NAME, Batch
from sirtaki.bindings.waiting import failure_of, wait_for
from sirtaki.common.ops.requests import NO_REDUCTION, Call, Reduction, describe
from sirtaki.common.ops.tensor import TensorView
from sirtaki.torch import device
from sirtaki.torch.backend.work import GroupWork, StreamWork
from sirtaki.torch.ops.tensors import count_write, refuse_overlap, view


def _nothing(context: Context, batch: Batch, index: int) -> None:
    """Stores no result."""


@dataclass(slots=True)
class RequestPart:
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
        parts: Sequence[RequestPart],
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


def _described(name: str, process_set: int, parts: Sequence[RequestPart]) -> Batch:
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
        """Reorders values, indexed by rank of the group, into the order of the process set."""
        return by_rank if self.is_ascending else [by_rank[rank] for rank in self._ranks]

    def parts_to_set(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """Puts a tensor's parts, of `counts` elements for each rank of the group, into the set's order."""
        return joined(self.to_set(tensor.detach().reshape(-1).split(list(counts))))

    def parts_from_set(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """Reverts `parts_to_set`; the counts are for each rank of the group here, too."""
        parts = tensor.reshape(-1).split(list(self.to_set(counts)))
        return joined([parts[place] for place in self._places])


# ---- Process sets that only their members add, for groups of some of the ranks -------------------------

# A set is added once per world, and stays until the world ends: groups of the same ranks share it, whenever
# each rank creates or destroys them.


class MemberSet:
    """A process set that is being added: no member waits for other members before the first operation."""

    def __init__(self, context: Context, ranks: Sequence[int]) -> None:
        self._context, self._ranks = context, list(ranks)
        self._begin_lock, self._lock = threading.Lock(), threading.Lock()
        self._is_begun = False
        self._number: int | None = None
        self._batch = Batch(1)
        self._batch.set_member_set_request(0, self._ranks, _name_of(self._ranks))

    def begin(self) -> None:
        """Submits the addition, unless another group of these ranks has, in whichever thread."""
        with self._begin_lock:
            if not self._is_begun:
                self._context.enqueue(self._batch)
                self._is_begun = True

    def number(self, timeout: timedelta) -> int:
        """Returns the core's number of the set, once all members have created a group of it.

        Raises:
            DeadlineError: a member has not created one in time.
            HorovodInternalError: the set could not be added, because a rank was lost or has finished.
        """
        with self._lock:
            if self._number is None:
                self._number = self._wait(timeout)
            return self._number

    def _wait(self, timeout: timedelta) -> int:
        if not wait_for(self._context, self._batch, timeout.total_seconds()):
            raise DeadlineError(
                f"rank {self._context.rank}: not all of the ranks {self._ranks} have created their process "
                f"group within {timeout.total_seconds():g} s"
            )
        failure = failure_of(self._context, self._batch)
        if failure is not None:
            raise failure
        number = self._context.result_number(self._batch)
        self._context.release(self._batch)
        return number


def _name_of(ranks: Sequence[int]) -> str:
    """Returns a name that no other ranks use for a set of theirs."""
    return f"process group of {short_list(ranks)}"


class WorldSet:
    """The process set of all ranks, which always exists."""

    def number(self, timeout: timedelta) -> int:
        """Returns the core's number of the set."""
        return 0


def set_of(context: Context, ranks: Sequence[int]) -> WorldSet | MemberSet:
    """Returns the process set of these ranks, in ascending order; this rank must be a member."""
    if len(ranks) == context.size:
        return WorldSet()
    found: MemberSet = context.member_sets.setdefault(tuple(ranks), MemberSet(context, ranks))
    found.begin()
    return found


# ---- The names of a process group's operations: ranks match them by their order, as in c10d ------------
# Groups of the same ranks are numbered in the order of their creation: torch's names of groups may differ
# between ranks (`new_group` with `use_local_synchronization`). All collectives of a group are numbered in one
# series, so that ranks that call different ones get an error that names both. Each pair of ranks has a series
# per tag and direction. Horovod's calls have other names.


_COLLECTIVES_BEFORE_WRAP = 1024  # a name that is still in flight makes the next operation of that name wait
_MESSAGES_BEFORE_WRAP = 16  # few, so that the response cache knows the names of a pipeline
_LONGEST_LIST = 100  # characters


def short_list(ranks: Sequence[int]) -> str:
    """Returns a text that no other list of ranks has."""
    listed = str(list(ranks))
    if len(listed) <= _LONGEST_LIST:
        return listed
    digest = hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()
    return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}, {digest}"


class Series:
    """Names that are numbered from 0, and used again after a while."""

    def __init__(self, prefix: str, before_wrap: int) -> None:
        self._prefix, self._before_wrap = prefix, before_wrap
        self._next = 0

    @property
    def count(self) -> int:
        """Returns the number of names that were taken."""
        return self._next

    def take(self, suffix: str = "") -> str:
        """Returns the next name."""
        self._next += 1
        return f"{self._prefix}.{(self._next - 1) % self._before_wrap}{suffix}"

    def give_back(self) -> None:
        """Makes the last name the next name again: no operation was submitted under it."""
        self._next -= 1


class Names:
    """The names of a group's operations.

    Attributes:
        collectives: those of its collectives.
    """

    def __init__(self, context: Context, members: Sequence[int]) -> None:
        """Numbers a new group of these ranks; other groups may have the same ranks in another order."""
        is_ascending = list(members) == sorted(members)
        order = "" if is_ascending else f"{short_list(members)}."
        self._prefix = f"c10d.{order}{context.next_number(f'groups of {list(members)}')}"
        self.collectives = Series(self._prefix, _COLLECTIVES_BEFORE_WRAP)
        self._messages: dict[tuple[int, int, int], Series] = {}

    def messages(self, sender: int, receiver: int, tag: int) -> Series:
        """Returns the names of the messages from `sender` to `receiver` with this tag."""
        prefix = f"{self._prefix}.{sender}-{receiver}.{tag}"
        return self._messages.setdefault((sender, receiver, tag), Series(prefix, _MESSAGES_BEFORE_WRAP))


# ---- Tensors of torch.distributed's calls, as rows of memory that the core reads and writes ------------


def single(tensors: Sequence[Given], what: str) -> Given:
    """Returns the only element of a list: this rank's tensor, or its list of tensors."""
    if isinstance(tensors, Tensor):
        raise TypeError(f"{what} takes a list with one tensor, not a tensor")
    if len(tensors) != 1:
        raise ValueError(f"{what} has {len(tensors)} entries, but a rank passes exactly one")
    return tensors[0]


def whole(tensor: Tensor) -> TensorView:
    """Returns a view of a tensor that is exchanged as it is, in any dense order."""
    return view(tensor.detach())


def rows(tensor: Tensor, count: int) -> TensorView:
    """Returns a view of a tensor's elements in `count` rows; the owner is a copy if it is not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if flat.numel() % max(count, 1):
        raise ValueError(f"a tensor of {flat.numel()} elements cannot be divided evenly among {count} ranks")
    return view(flat.view(count, flat.numel() // max(count, 1)))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the concatenated elements of several tensors, detached, in a single dimension."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def require_equal(tensors: Sequence[Tensor], like: Tensor, count: int, what: str) -> None:
    """Raises ValueError unless there are `count` tensors with the dtype and number of elements of another."""
    if len(tensors) != count:
        raise ValueError(f"{what} has {len(tensors)} tensors, but the group has {count} ranks")
    for rank, tensor in enumerate(tensors):
        require_elements(tensor, like.numel(), like, f"{what}[{rank}]")


def require_elements(tensor: Tensor, count: int, like: Tensor, what: str) -> None:
    """Raises ValueError unless a tensor has `count` elements, with the dtype and on the device of another."""
    if tensor.device != like.device:
        raise ValueError(f"{what} is on {tensor.device}, but this rank's other tensor on {like.device}")
    if tensor.dtype != like.dtype:
        raise ValueError(
            f"{what} has the dtype {tensor.dtype}, but this rank's other tensor has {like.dtype}"
        )
    if tensor.numel() != count:
        raise ValueError(f"{what} has {tensor.numel()} elements instead of {count}")


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two contiguous tensors overlap."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return begin < other.data_ptr() + other.numel() * other.element_size() and other.data_ptr() < end


def written(tensor: Tensor, owner: Tensor) -> None:
    """Ends a write to a tensor: `owner` is the memory that was written, the tensor's own or another's."""
    if owner.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        assign(tensor, owner)
    elif not tensor.is_inference():  # these do not count writes
        count_write([tensor])


def assign(tensor: Tensor, values: Tensor) -> None:
    """Copies values to a tensor of as many elements, in row-major order."""
    refuse_overlap(tensor)
    with _writing(tensor):
        tensor.copy_(values.reshape(tensor.shape))


def _writing(tensor: Tensor) -> AbstractContextManager[object]:
    # Tensors of inference mode can be written to in this mode only, and the mode belongs to a thread.
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()
