"""The names of a process group's operations, by which its ranks match them: by their order, as in c10d.

Groups of the same ranks are numbered in the order of their creation: torch's names of groups may differ
between ranks (`new_group` with `use_local_synchronization`). All collectives of a group are numbered in one
series, so that ranks that call different ones get an error that names both. Each pair of ranks has a series
per tag and direction. Horovod's calls have other names.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from sirtaki.bindings.context import Context

_COLLECTIVES_BEFORE_WRAP = 1024  # a name that is still in flight makes the next operation of that name wait
_MESSAGES_BEFORE_WRAP = 16  # few, so that the response cache knows the names of a pipeline


class Names:
    """The names of one group."""

    def __init__(self, context: Context, members: Sequence[int]) -> None:
        """Numbers a new group of these ranks."""
        self._prefix = f"c10d.{context.next_number(f'groups of {members}')}"
        self._collectives = count()
        self._messages: dict[tuple[int, int, int], count[int]] = {}

    def next_collective(self) -> str:
        """Returns the name of the group's next collective."""
        return f"{self._prefix}.{next(self._collectives) % _COLLECTIVES_BEFORE_WRAP}"

    def next_message(self, sender: int, receiver: int, tag: int) -> str:
        """Returns the name of the next message from one rank to another with this tag."""
        numbers = self._messages.setdefault((sender, receiver, tag), count())
        return f"{self._prefix}.{sender}-{receiver}.{tag}.{next(numbers) % _MESSAGES_BEFORE_WRAP}"
