"""The parameters in an optimizer's groups, to notice those that a program puts there without a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.groups import Groups


class ListedParameters:
    """The parameters of each group at one time."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._lists: list[list[Tensor]] = [list(group["params"]) for group in groups]

    def are_in(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether groups have exactly these. Cheap: called in each step."""
        lists = self._lists
        if len(lists) != len(groups):
            return False
        for mine, group in zip(lists, groups, strict=True):
            present = group["params"]
            if len(mine) != len(present) or not all(map(is_, mine, present)):
                return False
        return True

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for parameters in self._lists for parameter in parameters)

    def refuse_others(self, groups: Sequence[Mapping[str, Any]], technique: str) -> None:
        """Raises UnsupportedError if groups have a parameter that is not among these. Cheap, as `are_in`."""
        if self.are_in(groups):
            return
        known = set(self)
        for number, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in known:
                    raise UnsupportedError(
                        f"the program has put a parameter into optimizer.param_groups[{number}]['params'] "
                        f"(index {place}, shape {tuple(parameter.shape)}) since the optimizer was wrapped, "
                        f"and with {technique} only the parameters of that time are exchanged: make a new "
                        "optimizer with the new parameters and wrap that"
                    )

    def heirs_of(self, earlier: ListedParameters) -> dict[Tensor, Tensor]:
        """Returns, by parameters that are gone, those that have taken their places."""
        before, now = set(earlier), set(self)
        return {
            old: new
            for theirs, mine in zip(earlier._lists, self._lists, strict=False)
            for old, new in zip(theirs, mine, strict=False)
            if old not in now and new not in before
        }


def inherited_names(
    names: Mapping[Tensor, str], heirs: Mapping[Tensor, Tensor], present: ListedParameters
) -> dict[Tensor, str]:
    """Returns the names of the present parameters; heirs get those of the parameters that are gone."""
    there = set(present)
    found = {heirs.get(one, one): name for one, name in names.items()}
    return {one: name for one, name in found.items() if one in there}


def inherited_groups(groups: Groups, heirs: Mapping[Tensor, Tensor], present: ListedParameters) -> Groups:
    """Returns lists of parameters that are exchanged together, with the heirs of those that are gone."""
    if groups is None or isinstance(groups, int):
        return groups
    there = set(present)
    found = [[heirs.get(one, one) for one in group] for group in groups]
    return [[one for one in group if one in there] for group in found]
