"""The names of a process group's operations, by which its ranks match them: by their order, as in c10d.

Groups of the same ranks are numbered in the order of their creation: torch's names of groups may differ
between ranks (`new_group` with `use_local_synchronization`). All collectives of a group are numbered in one
series, so that ranks that call different ones get an error that names both. Each pair of ranks has a series
per tag and direction. Horovod's calls have other names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sirtaki.bindings.context import Context

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
        """Makes the last name the next one again: nothing was queued under it."""
        self._next -= 1


class Names:
    """The names of one group.

    Attributes:
        collectives: those of its collectives.
    """

    def __init__(self, context: Context, members: Sequence[int]) -> None:
        """Numbers a new group of these ranks, which may have another order than those of other groups."""
        is_ascending = list(members) == sorted(members)
        order = "" if is_ascending else f"{short_list(members)}."
        self._prefix = f"c10d.{order}{context.next_number(f'groups of {list(members)}')}"
        self.collectives = Series(self._prefix, _COLLECTIVES_BEFORE_WRAP)
        self._messages: dict[tuple[int, int, int], Series] = {}

    def messages(self, sender: int, receiver: int, tag: int) -> Series:
        """Returns the names of the messages from one rank to another with this tag."""
        prefix = f"{self._prefix}.{sender}-{receiver}.{tag}"
        return self._messages.setdefault((sender, receiver, tag), Series(prefix, _MESSAGES_BEFORE_WRAP))
