"""Process sets: subsets of the ranks, which run operations among themselves.

Sets may overlap. Sets without a common rank do not wait for each other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import current, find
from sirtaki.common.handles import pooled_batch, run_without_tensors


class ProcessSet:
    """A subset of the ranks. `add_process_set` makes it usable.

    Attributes:
        ranks: the ranks of the world that belong to it, ascending.
        process_set_id: its number, equal on all ranks; None until it has been added, and after its removal.
        mpi_comm: None: sirtaki uses no MPI.
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
        return len(self.ranks) if self._is_in_use else None

    def included(self) -> bool | None:
        """Returns whether this rank belongs to it; None if it has not been added."""
        return current().rank in self.ranks if self._is_in_use else None

    def rank(self) -> int | None:
        """Returns this rank's index among its ranks, from 0; None if it has not been added.

        Raises:
            ValueError: this rank does not belong to it.
        """
        if not self._is_in_use:
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

    def _begin(self, context: Context, number: int) -> None:
        self._context, self._number = context, number

    def _end(self) -> None:
        self._context = self._number = None

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
    """Makes a process set usable. All ranks must call it, including those that do not belong to it.

    Args:
        process_set: a set, or its ranks.

    Returns:
        The set.

    Raises:
        ValueError: it has no ranks, unknown ranks or a rank twice; or a set of these ranks is already in use.
        MismatchError: the ranks named different sets.
        PeerLostError: a rank died.
    """
    context = current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.process_set_id is not None:
        raise ValueError(f"{added} is in use already")
    batch = pooled_batch()
    batch.set_process_set_request(0, core.ADD_PROCESS_SET, ranks=added._ranks)
    added._begin(context, run_without_tensors(context, batch))
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends the use of a process set. All ranks must call it, including those that do not belong to it.

    Operations in flight in the set end with a ValueError on every rank.

    Returns:
        Whether it was in use. False for the set of all ranks, which cannot be removed.

    Raises:
        MismatchError: the ranks named different sets.
        PeerLostError: a rank died.
    """
    context = current()
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    batch = pooled_batch()
    batch.set_process_set_request(0, core.REMOVE_PROCESS_SET, number=process_set.number(context))
    run_without_tensors(context, batch)
    process_set._end()
    return True
