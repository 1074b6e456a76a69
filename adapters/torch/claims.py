"""Ensures one reducer for each parameter: two would combine its gradient twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakSet

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Claim:
    """A reducer's right to exchange the gradients of its parameters, until it is released.

    A second claim by itself is no mistake: a notebook cell that runs again makes a new optimizer while the
    scheduler of the old one still holds the old one. Two claims in use are a mistake.
    """

    _by_parameter: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()  # sets of claims
    _created: ClassVar[int] = 0

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self._checked = 0  # number of claims at the last check that found no conflict
        for _, parameter in named:
            self._by_parameter.setdefault(parameter, WeakSet()).add(self)
        Claim._created += 1

    def release(self) -> None:
        """Releases the parameters."""
        for _, parameter in self._named:
            self._by_parameter[parameter].discard(self)

    def check_exclusive(self) -> None:
        """Raises ValueError if another reducer has a claim on one of the parameters."""
        created = Claim._created
        if created == self._checked:
            return
        for name, parameter in self._named:
            if len(self._by_parameter[parameter]) > 1:
                raise ValueError(
                    f"two DistributedOptimizers exchange the gradient of parameter {name!r}, so it would be "
                    "combined over the ranks twice: before the next backward pass, delete the optimizer that "
                    "is not used any more, and what holds it, such as its learning rate scheduler"
                )
        self._checked = created
