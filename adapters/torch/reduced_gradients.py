"""The gradients that have been combined over the ranks, where they must not be combined again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from sirtaki.torch.parameters import NamedParameter
from sirtaki.torch.sharded.gradient import ShardedGradient


class ReducedGradients:
    """The combined gradients of an optimizer, by the index of their parameter."""

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self._named = named
        self._combined: dict[int, weakref.ref[Tensor]] = {}
        self._versions: dict[int, int] = {}  # number of writes into them when the optimizer last used them

    def note(self, indices: Iterable[int]) -> None:
        """Records the gradients of these parameters, and no others, as combined."""
        gradients = ((index, self._named[index].parameter.grad) for index in indices)
        self._combined = {index: weakref.ref(one) for index, one in gradients if one is not None}
        self._versions = {}

    def note_use(self) -> None:
        """Records that the optimizer has used the gradients: whoever writes into one from now on renews it.

        What the program has changed before, such as by clipping, was meant for that step.
        """
        if self._combined:
            self._versions = {index: _version_of(one()) for index, one in self._combined.items()}

    def take(self, other: ReducedGradients, sources: Sequence[int | None]) -> None:
        """Takes over what is known of the same gradients there.

        `sources` are the indices there of the parameters here; None: a new one, which may have been given the
        gradient of another.
        """
        by_gradient = {id(one()): index for index, one in other._combined.items() if one() is not None}
        for index, source in enumerate(sources):
            at = by_gradient.get(id(self._named[index].parameter.grad)) if source is None else source
            if at in other._combined:
                self._combined[index] = other._combined[at]
            if at in other._versions:
                self._versions[index] = other._versions[at]

    def clear(self) -> None:
        self._combined.clear()

    def forget(self, index: int) -> None:
        """Records that a parameter has a new gradient, which may be in the memory of the last one."""
        self._combined.pop(index, None)

    def grown(self, indices: Iterable[int]) -> int | None:
        """Returns the first of these parameters whose combined gradient a pass has added to; None: none."""
        for index in indices if self._combined else ():
            if self._is_known(index):
                return index
        return None

    def lacks(self, index: int) -> bool:
        """Returns whether this parameter has a gradient that was in no round."""
        gradient = self._named[index].parameter.grad
        return (
            gradient is not None and not isinstance(gradient, ShardedGradient) and not self._is_known(index)
        )

    def take_new(self) -> list[int]:
        """Returns the parameters with gradients whose values no round has combined, to exchange them."""
        new = [index for index in range(len(self._named)) if self.lacks(index) or self._is_renewed(index)]
        for index in new:
            self.forget(index)
        return new

    def _is_known(self, index: int) -> bool:
        known, gradient = self._combined.get(index), self._named[index].parameter.grad
        return known is not None and gradient is not None and known() is gradient

    def _is_renewed(self, index: int) -> bool:
        gradient = self._named[index].parameter.grad
        version = self._versions.get(index)
        return version is not None and self._is_known(index) and version != _version_of(gradient)


def _version_of(gradient: Tensor | None) -> int:
    """Returns the number of writes into a gradient; 0 if torch does not count them."""
    if type(gradient) is not Tensor or gradient.is_inference():
        return 0
    return gradient._version
