"""The exchange of an optimizer's gradients, whatever backend they are on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import keras

from sirtaki._core.current import current
from sirtaki.common.ops import Max
from sirtaki.common.process_sets import ProcessSet
from sirtaki.keras.backends import Backend, Combination, Gradient
from sirtaki.keras.compression import Compressor, NoneCompressor

Groups = int | Sequence[Sequence[Any]] | None


@dataclass
class LocalVariables:
    """Variables whose gradients stay on this rank: single ones, and those of layers, which may get more.

    Attributes:
        scale: whether such gradients are divided by the number of ranks, as the average of the others is.
    """

    scale: bool = True
    variables: list[Any] = field(default_factory=list)
    layers: list[Any] = field(default_factory=list)

    def numbers(self) -> set[int]:
        """What `id()` says of each."""
        owned = [variable for layer in self.layers for variable in layer.trainable_variables]
        return {id(variable) for variable in [*self.variables, *owned]}


@dataclass
class Exchange:
    """How the gradients of an optimizer are reduced. Shared by optimizers that wrap each other.

    Attributes:
        backend: gets gradients to the core and back.
        prefix: what all names begin with, the same on all ranks.
        how: how gradients are combined.
        compression: how they travel.
        groups: which of them complete together: as so many groups, or as lists of variables; None: all.
        sparse_as_dense: whether sparse gradients travel as dense ones.
        factor: multiplies what has been combined; passes that add up are averaged by Keras, not summed.
        local: which gradients are not exchanged.
        has_reduced: whether gradients have been reduced, or a step that does so has been compiled.
    """

    backend: Backend
    prefix: str
    how: Combination
    compression: type[Compressor] = NoneCompressor
    groups: Groups = None
    sparse_as_dense: bool = False
    factor: float = 1.0
    local: LocalVariables = field(default_factory=LocalVariables)
    has_reduced: bool = field(default=False, init=False)
    _is_done: bool = field(default=False, init=False)
    _postponed: list[Any] = field(default_factory=list, init=False)

    @property
    def is_done(self) -> bool:
        """Whether the gradients that are being applied have been reduced."""
        return self._is_done

    @contextmanager
    def done(self) -> Iterator[None]:
        """What is applied inside has been reduced."""
        before, self._is_done = self._is_done, True
        try:
            yield
        finally:
            self._is_done = before

    @contextmanager
    def postponed(self, variables: Sequence[Any]) -> Iterator[None]:
        """Inside, `reduce_postponed` reduces gradients of these variables, once they have added up."""
        self._postponed = list(variables)
        try:
            with self.done():
                yield
        finally:
            self._postponed = []

    def reduce_postponed(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients that were postponed, reduced; those of other optimizers as they are."""
        return self.reduce(gradients, self._postponed) if self._postponed else list(gradients)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of these variables (None where there is none), reduced over all ranks.

        All ranks of the process set must call it, with as many gradients in the same order.
        """
        self.has_reduced = True
        results = list(gradients)
        members = self.how.process_set.members(current())
        if current().rank in members and len(members) > 1:
            self._reduce_among(len(members), results, variables)
        if self.factor != 1.0:
            results = [None if one is None else self.backend.scaled(one, self.factor) for one in results]
        return results

    def _reduce_among(self, ranks: int, results: list[Any], variables: Sequence[Any]) -> None:
        own = self.local.numbers()
        overwriting = {id(one) for one in variables if getattr(one, "overwrite_with_gradient", False)}
        travelling: list[int] = []
        for index, variable in enumerate(variables):
            if id(variable) not in own:
                travelling.append(index)
            elif self.local.scale and results[index] is not None:
                results[index] = self.backend.scaled(results[index], 1.0 / ranks)
        # What Keras stores as it is, such as the largest values of 8-bit floats, has no sum.
        stored = [index for index in travelling if id(variables[index]) in overwriting]
        if stored:
            how = Combination(Max, process_set=self.how.process_set)
            self._reduce_group("stored", stored, results, variables, how, NoneCompressor)
        travelling = [index for index in travelling if id(variables[index]) not in overwriting]
        for place, group in enumerate(_parts(travelling, variables, self.groups)):
            self._reduce_group(str(place), group, results, variables, self.how, self.compression)

    def _reduce_group(
        self,
        name: str,
        indices: Sequence[int],
        results: list[Any],
        variables: Sequence[Any],
        how: Combination,
        compression: type[Compressor],
    ) -> None:
        """Replaces the results of these indices by reduced ones."""
        gradients, undo = [], []
        for index in indices:
            value, variable = results[index], variables[index]
            is_absent = value is None
            if is_absent:
                value = keras.ops.zeros(variable.shape, variable.dtype)
            elif self.sparse_as_dense and self.backend.is_sparse(value):
                value = keras.ops.convert_to_tensor(value)
            if self.backend.is_sparse(value):
                undo.append(_AS_IT_IS)
            else:
                value, context = compression.compress(value)
                undo.append(context)
            gradients.append(Gradient(f"{self.prefix}.{index}.{readable(variable)}", value, is_absent))
        reduced = self.backend.allreduce(f"{self.prefix}.{name}", gradients, how)
        for index, value, context in zip(indices, reduced, undo, strict=True):
            restores = value is not None and context is not _AS_IT_IS
            results[index] = compression.decompress(value, context) if restores else value


_AS_IT_IS = object()


def readable(variable: Any) -> str:
    """A variable's path, without Keras' running numbers, which may differ between ranks."""
    path = str(getattr(variable, "path", variable.name))
    return re.sub(r"_\d+(?=/|:|$)", "", path)


def _parts(indices: list[int], variables: Sequence[Any], groups: Groups) -> list[list[int]]:
    """The indices, cut into those that complete together."""
    if groups is None or groups == 0:
        return [indices] if indices else []
    if isinstance(groups, int):
        count = min(groups, len(indices))
        ends = [len(indices) * number // count for number in range(count + 1)] if count else []
        return [indices[start:end] for start, end in pairwise(ends)]
    place = {id(variable): number for number, group in enumerate(groups) for variable in group}
    parts: dict[Any, list[int]] = {}
    for index in indices:
        parts.setdefault(place.get(id(variables[index]), f"alone {index}"), []).append(index)
    return list(parts.values())


def combination(op: int, predivide: float, process_set: ProcessSet) -> Combination:
    """How gradients are combined; `predivide` divides before an average, and multiplies after it."""
    return Combination(op, 1.0 / predivide, predivide, process_set)
