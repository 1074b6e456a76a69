"""The description of a state's arrays: what each is called, and what the ranks have in common about it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from sirtaki.common.checksums import checksum_of_text


class Kind(Enum):
    """The relation between the ranks' values of one array.

    Attributes:
        EQUAL: the same on all ranks, such as parameters. Checked after each change of the ranks.
        SENT: sent to ranks that need a state, but otherwise each rank's own, such as moving statistics.
        OWN: never sent, such as the states of random number generators.
    """

    EQUAL = "equal"
    SENT = "sent"
    OWN = "own"


class Entry(NamedTuple):
    """One array of a state.

    Attributes:
        name: unique in the state; the same on all ranks, unless the kind is OWN.
        shape: elements along each dimension.
        dtype: the element type.
        kind: the relation between the ranks' values.
        target: what the array is written to, as the state's class understands it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: Kind = Kind.EQUAL
    target: Any = None

    @property
    def description(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"


class Descriptions:
    """The names, dtypes and shapes of entries, in the form that `sirtaki.common.consistency` compares."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    def checksum(self) -> int:
        """Returns one checksum of all descriptions."""
        return checksum_of_text(repr([(entry.name, entry.description) for entry in self._entries]))

    def names(self) -> Sequence[str]:
        return [entry.name for entry in self._entries]

    def kinds(self) -> Sequence[str]:
        return [entry.description for entry in self._entries]

    def checksums(self) -> Sequence[int]:
        return [0] * len(self._entries)  # values are not compared here

    def spread(self, index: int) -> Any:
        raise NotImplementedError("values are not compared here")
