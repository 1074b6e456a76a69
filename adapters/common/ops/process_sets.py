"""Process sets: subsets of the ranks, which run operations among themselves.

Sets may overlap. Sets without a common rank do not wait for each other.

In an elastic job, a set that was added before `hvd.elastic.run` follows its members from world to world:
sirtaki.common.elastic.loop.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context, current, find
from sirtaki.bindings.errors import NotInitializedError
from sirtaki.bindings.observing import observe
from sirtaki.bindings.observing.observe import operation_counts
from sirtaki.bindings.observing.user_code import CallSite, program_sites
from sirtaki.common.ops.handles import pooled_batch, run_without_tensors
from sirtaki.common.ops.tensor import DTYPE_CODES


class ProcessSet:
    """A subset of the ranks. `add_process_set` makes it usable.

    Attributes:
        ranks: the ranks of the world that belong to it, ascending.
        process_set_id: its number, equal on all ranks; None until it has been added, and after its removal.
        mpi_comm: None: sirtaki uses no MPI.

    Example:
        even = hvd.ProcessSet(range(0, hvd.size(), 2))
        hvd.add_process_set(even)
        if even.included():
            mean = hvd.allreduce(tensor, process_set=even)
        hvd.remove_process_set(even)
    """

    mpi_comm = None

    def __init__(self, ranks: Iterable[int]) -> None:
        """Stores the ranks; nothing is sent yet.

        Raises:
            ValueError: a value that is not a whole number.
        """
        try:
            self._ranks = sorted(operator.index(rank) for rank in ranks)
        except TypeError:
            raise ValueError(f"a process set is a list of ranks, such as [0, 2], not {ranks!r}") from None
        self._number: int | None = None
        self._context: Context | None = None
        self._why_unusable = ""  # in an elastic job: why it is not in use, although it was added
        self._is_shared = False  # the core's set is that of another object

    @property
    def ranks(self) -> list[int]:
        return list(self._ranks)

    @property
    def process_set_id(self) -> int | None:
        return self._number if self._is_in_use else None

    @property
    def _is_in_use(self) -> bool:
        return self._context is not None and self._context is find()

    def number(self, context: Context) -> int:
        """Returns the core's number of the set.

        Raises:
            ValueError: it has not been added to this world, or has been removed.
        """
        if self._number is None or self._context is not context:
            self._check_usable()
            raise ValueError(
                f"{self} is not in use: all ranks have to call add_process_set() with it after init()"
            )
        return self._number

    def members(self, context: Context) -> list[int]:
        """Returns the ranks that belong to it. Raises ValueError if it has not been added to this world."""
        self.number(context)
        return self._ranks

    def size(self) -> int | None:
        """Returns the number of its ranks; None if it has not been added."""
        return len(self.ranks) if self._is_usable() else None

    def included(self) -> bool | None:
        """Returns whether this rank belongs to it; None if it has not been added."""
        return current().rank in self.ranks if self._is_usable() else None

    def rank(self) -> int | None:
        """Returns this rank's index among its ranks, from 0; None if it has not been added.

        Raises:
            ValueError: this rank does not belong to it.
        """
        if not self._is_usable():
            return None
        ranks, own = self.ranks, current().rank
        if own not in ranks:
            raise ValueError(f"rank {own} does not belong to {self}")
        return ranks.index(own)

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        """Returns the set itself: a copy of a model is trained by the same ranks."""
        return self

    def __reduce__(self) -> Any:
        """Pickles the ranks only: in another process the set has yet to be added."""
        return type(self), (self._ranks,)

    def _is_usable(self) -> bool:
        """Returns whether it is in use.

        Raises:
            NotInitializedError, ValueError: it was added, but the ranks of an elastic job do not exist yet,
                or have changed.
        """
        if not self._is_in_use:
            self._check_usable()
        return self._is_in_use

    def _check_usable(self) -> None:
        context = find()
        if self._why_unusable:
            kind = NotInitializedError if context is not None and context.is_provisional else ValueError
            raise kind(f"the process set of ranks {self._ranks} cannot be used: {self._why_unusable}")
        if self._context is not None and context is not None and context.survivors is not None:
            raise ValueError(
                f"the process set of ranks {self._ranks} was added inside the training function, by an "
                "execution of it that has ended when the ranks changed: add it again when the function "
                "begins, or add it before hvd.elastic.run"
            )

    def _begin(self, context: Context, number: int) -> None:
        self._context, self._number = context, number
        self._why_unusable, self._is_shared = "", False

    def _end(self, why_unusable: str = "") -> None:
        self._context = self._number = None
        self._why_unusable, self._is_shared = why_unusable, False

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__


class _AllRanks(ProcessSet):
    """The set of all ranks, which always exists."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def ranks(self) -> list[int]:
        context = find()
        return [] if context is None else list(range(context.size))

    @property
    def process_set_id(self) -> int | None:
        return 0

    @property
    def _is_in_use(self) -> bool:
        return find() is not None

    def __reduce__(self) -> Any:
        return "global_process_set"

    def number(self, context: Context) -> int:
        return 0

    def members(self, context: Context) -> list[int]:
        return list(range(context.size))


global_process_set: ProcessSet = _AllRanks()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a process set usable. All ranks must call it, including ranks outside the set.

    In an elastic job, a set that is added before `hvd.elastic.run` consists of these ranks of the first
    generation, in all generations in which all of them live. A set that the training function adds ends with
    its execution.

    Args:
        process_set: a set, or its ranks.

    Returns:
        The set.

    Raises:
        ValueError: it has no ranks, unknown ranks or a rank twice; or a set of these ranks is already in use.
        MismatchError: the ranks named different sets.
        PeerLostError: a rank died.

    Example:
        first_half = hvd.add_process_set(range(hvd.size() // 2))  # rank 0 of 2 ranks
        if first_half.included():
            mean = hvd.allreduce(tensor, process_set=first_half)
        hvd.remove_process_set(first_half)
    """
    context = current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.process_set_id is not None:
        raise ValueError(f"{added} is in use already")
    if context.is_provisional:
        _declare(context, added)
        return added
    add_to_world(context, added)
    return added


def add_to_world(context: Context, added: ProcessSet) -> None:
    """Adds a process set to the core's process sets. All ranks call it.

    The sizes of an elastic job's worlds change. There, a set of all ranks, or of the ranks of a set that
    follows its members, shares the existing set of the core.
    """
    if context.survivors is not None:
        all_ranks = added._ranks == list(range(context.size))
        same = global_process_set if all_ranks else _following(context, added._ranks)
        if same is not None:
            added._begin(context, same.number(context))
            added._is_shared = True
            return
    batch = pooled_batch()
    batch.set_process_set_request(0, core.ADD_PROCESS_SET, ranks=added._ranks)
    added._begin(context, run_without_tensors(context, batch))


def _declare(context: Context, added: ProcessSet) -> None:
    """Records a set that the first world of an elastic job will have."""
    assert context.survivors is not None
    declared = context.survivors.process_sets
    ranks = added._ranks
    if not ranks or ranks[0] < 0 or len(set(ranks)) < len(ranks):
        raise ValueError(f"a process set needs ranks, each of them once, not {ranks}")
    if any(other is added or other._ranks == ranks for other in declared):
        raise ValueError(f"a process set of ranks {ranks} has been added already")
    added._end("its ranks exist only inside the function that @hvd.elastic.run decorates")
    declared.append(added)


def _following(context: Context, ranks: Sequence[int]) -> ProcessSet | None:
    """Returns the set with these ranks that follows its members through an elastic job; None if none does."""
    assert context.survivors is not None
    following = [
        process_set for process_set in context.survivors.process_sets if process_set._context is context
    ]
    return next((other for other in following if other._ranks == ranks), None)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends the use of a process set. All ranks must call it, including ranks outside the set.

    Operations in flight in the set end with a ValueError on every rank.

    Returns:
        Whether it was in use. False for the set of all ranks, which cannot be removed.

    Raises:
        MismatchError: the ranks named different sets.
        PeerLostError: a rank died.

    Example:
        evaluators = hvd.add_process_set([0])
        ...  # operations with process_set=evaluators
        hvd.remove_process_set(evaluators)  # True
    """
    context = current()
    if context.is_provisional and _withdraw(context, process_set):
        return True
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    if not process_set._is_shared:
        batch = pooled_batch()
        batch.set_process_set_request(0, core.REMOVE_PROCESS_SET, number=process_set.number(context))
        run_without_tensors(context, batch)
    follows = context.survivors is not None and process_set in context.survivors.process_sets
    process_set._end("it has been removed" if follows else "")
    return True


def _withdraw(context: Context, process_set: ProcessSet) -> bool:
    """Reverts `_declare`; returns whether the set was declared."""
    assert context.survivors is not None
    declared = context.survivors.process_sets
    if all(other is not process_set for other in declared):
        return False
    declared[:] = [other for other in declared if other is not process_set]
    process_set._end()
    return True


# ---- The end of a rank's data, where ranks have unequal amounts ----------------------------------------


_BROADCAST = "broadcast"  # its name in core/plan/kind.h


@dataclass
class Joins:
    """The joins of a process set, as known on a rank of the set.

    Attributes:
        count: their number.
        missed: exchanges of other ranks during the last one.
        site: the program's line that has joined.
        broadcasts: of this rank until the last join.
    """

    count: int = 0
    missed: int = 0
    site: CallSite | None = None
    broadcasts: int = 0


def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """Signals that this rank has no more data, and waits until all ranks of the set have done so.

    Until then the rank takes part in the others' operations with neutral elements: zeros in sums, infinities
    in minima and maxima, ones in products, no rows in what is gathered. It cannot be the root of a broadcast,
    nor send or receive. An average still divides by the number of all ranks, or, with the setting
    join_average=contributors, by those that have not joined. All ranks of the set must call it in the end.

    Steps that the others still take do not change the parameters of a rank that has joined: broadcast them
    afterwards from the rank that joined last. A rank that has missed steps prints a warning if nothing is
    broadcast before `shutdown()` or the program's end.

    Args:
        device: the GPU on which this rank takes part, if the others' tensors are on GPUs; -1: the one that
            its own tensors have been on.
        process_set: the set in which this rank has no more data.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        ValueError: this rank does not belong to the set, or has joined it already.
        PeerLostError: a rank died.

    Example:
        for inputs, targets in loader[hvd.rank() :]:  # rank 1 has fewer batches than rank 0
            hvd.allreduce(inputs, name="inputs")
        last = hvd.join()  # the rank with the most batches
    """
    context, batch = current(), pooled_batch()
    number = process_set.number(context)
    batch.set_request(0, core.JOIN, DTYPE_CODES["uint8"], (), process_set=number, device=device)
    before = observe.tensors_of_others(context)
    last = run_without_tensors(context, batch)
    _count(context, number, observe.tensors_of_others(context) - before)
    return last


def joins_of(context: Context, process_set: int) -> Joins:
    """Returns the joins of a set, given by its number: the same object before and after each join."""
    joins: Joins = context.joins.setdefault(process_set, Joins())
    return joins


def _count(context: Context, number: int, missed: int) -> None:
    joins = joins_of(context, number)
    if not joins.count:
        context.shutdown_callbacks.append(lambda: _warn(context, joins))
    joins.count, joins.missed, joins.broadcasts = joins.count + 1, missed, _broadcasts(context)
    joins.site = next(reversed(program_sites()), None)


def _broadcasts(context: Context) -> int:
    return sum(row["operations"] for row in operation_counts(context) if row["kind"] == _BROADCAST)


def _warn(context: Context, joins: Joins) -> None:
    """Warns at the end of a world in which this rank has missed the last steps."""
    has_trained = context.steps.read().number > 0
    if joins.missed <= 0 or not has_trained or context.failure or _broadcasts(context) > joins.broadcasts:
        return
    sys.stderr.write(
        f"sirtaki: rank {context.rank} called hvd.join() {joins.site or ''} while other ranks still took "
        "steps, and nothing was broadcast afterwards: its parameters differ from theirs, and so does what "
        "each has saved. Broadcast the parameters from the rank that hvd.join() returns, the last one; for "
        "torch: hvd.join(model=model, optimizer=optimizer)\n"
    )
