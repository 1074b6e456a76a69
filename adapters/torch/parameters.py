"""The gradients of an optimizer: which exist, their names, and which are exchanged together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Groups = int | Sequence[Sequence[Tensor]] | None


class NamedParameter(NamedTuple):
    """A parameter, and the name of its gradient for ranks and messages.

    Its `group` is (id, number of members), equal on all ranks; (0, 0): it has no group.
    """

    name: str
    parameter: Tensor
    group: tuple[int, int] = (0, 0)


def names_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Returns the given names by parameter; none without names.

    Raises:
        ValueError: they are not pairs, not unique, or not those of all parameters.
    """
    if named is None:
        return {}
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters has to hold pairs (name, parameter): pass model.named_parameters()"
        )
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(
            f"named_parameters has names more than once: {', '.join(twice[:5])}; make them unique"
        )
    names = {parameter: name for name, parameter in pairs}
    unnamed = sum(one not in names for group in optimizer.param_groups for one in group["params"])
    if unnamed:
        raise ValueError(
            f"named_parameters leaves {unnamed} of the optimizer's parameters without a name: "
            "name all of them, or none"
        )
    return names


def check_groups(optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    """Raises ValueError unless these are groups of the optimizer's parameters."""
    if groups is None:
        return
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups is {groups}, but it has to be 0 (none) or the number of groups")
        return
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    seen: set[Tensor] = set()
    for place, group in enumerate(groups):
        if isinstance(group, Tensor) or not all(isinstance(one, Tensor) for one in group):
            raise ValueError("groups has to be a number, or a list of lists of parameters")
        for parameter in group:
            if parameter in seen:
                raise ValueError(f"a parameter of group {place} is in groups twice; it may be in one only")
            if parameter not in known:
                raise ValueError(f"a parameter of group {place} is not one of the optimizer's")
            seen.add(parameter)


def exchanged(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], groups: Groups, prefix: str
) -> list[NamedParameter]:
    """Returns the parameters that can have gradients, each once, in the order of the optimizer's groups."""
    found = list(all_named(optimizer, names))
    members = _members([parameter for _, parameter in found], groups)
    of: dict[Tensor, tuple[int, int]] = {}
    for place, group in enumerate(members):
        of.update(dict.fromkeys(group, (_group_id(f"{prefix}{place}"), len(group))))
    return [NamedParameter(prefix + name, one, of.get(one, (0, 0))) for name, one in found]


def all_named(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters that can have gradients, each once, with their names or positions."""
    seen = set()
    for group, settings in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(settings["params"]):
            can_have = parameter.is_floating_point() or parameter.is_complex()
            if can_have and parameter not in seen:
                seen.add(parameter)
                yield names.get(parameter, f"parameter {place} of group {group}"), parameter


def _members(parameters: list[Tensor], groups: Groups) -> list[list[Tensor]]:
    """Returns the parameters of each group with several; a number n means n groups of similar length."""
    if isinstance(groups, int):
        count = min(groups, len(parameters))
        ends = [len(parameters) * number // count for number in range(count + 1)] if count else []
        parts = [parameters[start:end] for start, end in pairwise(ends)]
    else:
        among = set(parameters)
        parts = [[one for one in group if one in among] for group in groups or ()]
    return [part for part in parts if len(part) > 1]


def _group_id(text: str) -> int:
    """Returns a positive number of 63 bits, the same on all ranks."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 | 1
