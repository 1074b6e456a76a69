"""Process sets that only their members add, for groups of some of the ranks.

A set is added once per world, and stays until the world ends: groups of the same ranks share it, whenever
each rank creates or destroys them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import DeadlineError
from sirtaki.bindings.request import Batch
from sirtaki.bindings.waiting import failure_of, wait_for
from sirtaki.torch.backend.names import short_list


class MemberSet:
    """A process set that is being added: no member waits for the others before the first operation."""

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
    """Returns the process set of these ranks, ascending; this rank is one of them."""
    if len(ranks) == context.size:
        return WorldSet()
    found: MemberSet = context.member_sets.setdefault(tuple(ranks), MemberSet(context, ranks))
    found.begin()
    return found
