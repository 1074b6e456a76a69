"""The order of a group's ranks, which is the caller's; process sets of the core are in ascending order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from sirtaki.torch.backend.tensors import joined

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
