"""The exchange of an optimizer's gradients, independent of the backend."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras

from sirtaki.bindings.context import Context, current, is_elastic, reserve_number
from sirtaki.bindings.observing.step_counters import Stepper
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Adasum, Average, Max, Sum, fixed_divisor, gradient_reduction
from sirtaki.common.training.combinations import require_all_ranks
from sirtaki.common.training.groups import Groups, partitioned
from sirtaki.keras._private import replaced
from sirtaki.keras.backends import Backend, Gradient, GradientCombination
from sirtaki.keras.compression import Compressor, NoneCompressor

KIND = "keras.optimizer.{}"  # the name of the counter of a process set's optimizers
_HALF_OVERFLOW = 65520.0  # the least number that float16 rounds to infinity


@dataclass
class LocalVariables:
    """Variables with gradients that stay on this rank: single variables, and all variables of layers.

    Attributes:
        scale: whether such gradients are divided by the number of ranks, like the average of the others.
    """

    scale: bool = True
    variables: list[Any] = field(default_factory=list)
    layers: list[Any] = field(default_factory=list)

    def numbers(self) -> set[int]:
        """Returns the `id()` of each."""
        owned = [variable for layer in self.layers for variable in layer.trainable_variables]
        return {id(variable) for variable in [*self.variables, *owned]}


class Rows(NamedTuple):
    """The rows of a batch that is split over the ranks: numbers, or tensors of a compiled step.

    Attributes:
        own: the number that this rank computes; with none it computes another rank's, which do not count.
        total: the number in the whole batch.
    """

    own: Any
    total: Any

    def counted(self, value: Any, factor: Any = 1.0) -> Any:
        """Returns a tensor, multiplied by a factor; zeros without own rows, even for infinite elements."""
        if isinstance(self.own, int):
            if not self.own:
                return keras.ops.zeros_like(value)
            return value if factor == 1.0 else value * factor
        scaled = value * keras.ops.cast(factor, value.dtype)
        return keras.ops.where(keras.ops.greater(self.own, 0), scaled, keras.ops.zeros_like(value))

    def weighted(self, gradient: Any, ranks: int) -> Any:
        """Scales the gradient of a mean over own rows so that its average over ranks is over all rows."""
        if isinstance(self.own, int):
            return self.counted(gradient, self.own * ranks / self.total)
        precision = "float64" if keras.backend.standardize_dtype(gradient.dtype) == "float64" else "float32"
        own, total = (keras.ops.cast(value, precision) for value in self)
        return self.counted(gradient, own * ranks / total)


@dataclass
class GradientReduction:
    """The reduction of an optimizer's gradients. Shared by optimizers that wrap each other.

    Attributes:
        backend: passes gradients to the core and back.
        prefix: the prefix of all names, the same on all ranks.
        how: the combination of gradients.
        compression: the format in which they are exchanged.
        groups: those that complete together: a number of groups, or lists of variables; None: all.
        sparse_as_dense: whether sparse gradients are exchanged as dense ones.
        factor: multiplies the combined gradients; Keras averages accumulated passes instead of adding them.
        local: the gradients that are not exchanged.
        number: its number among the optimizers that have been made in one world.
        has_reduced: whether gradients have been reduced, or a step that reduces them has been compiled.
        first_name: the name of the first operation of each step; None if there has been none.
        is_compiled: whether such a step has been compiled, so that nothing here sees it run.
        halves: the `id()` of variables of layers that compute in float16; None: not known yet.
        is_done: whether the gradients that are being applied have been reduced.
    """

    backend: Backend
    prefix: str
    how: GradientCombination
    compression: type[Compressor] = NoneCompressor
    groups: Groups = None
    sparse_as_dense: bool = False
    factor: float = 1.0
    local: LocalVariables = field(default_factory=LocalVariables)
    number: int = 0
    has_reduced: bool = field(default=False, init=False)
    is_compiled: bool = field(default=False, init=False)
    first_name: str | None = field(default=None, init=False)
    halves: set[int] | None = field(default=None, init=False)
    is_done: bool = field(default=False, init=False)
    _adds_up: bool = field(default=False, init=False)
    _rows: Rows | None = field(default=None, init=False)
    _recorded: list[Any] | None = field(default=None, init=False)
    _postponed: Sequence[Any] = field(default=(), init=False)

    def move_to(self, context: Context) -> None:
        """Continues in another world, under the same names: steps that have been compiled contain them."""
        number = self.how.process_set.number(context)
        reserve_number(context, KIND.format(number), self.number)

    def retire(self) -> None:
        """Does nothing: another optimizer of the same name does not conflict with this optimizer."""

    def done(self) -> AbstractContextManager[None]:
        """Marks the gradients that are applied inside as reduced."""
        return replaced(self, is_done=True)

    def counting(self, rows: Rows) -> AbstractContextManager[None]:
        """Makes gradients that are applied inside count by the rows of this rank's part of a batch."""
        return replaced(self, _rows=rows)

    @property
    def counts_rows(self) -> bool:
        """Returns whether the gradients that are being applied belong to a part of a batch."""
        return self._rows is not None

    @property
    def is_split(self) -> bool:
        """Returns whether a step's batch is split over the ranks, or its split is being tried."""
        return self._rows is not None or self._recorded is not None

    def weighted(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients as they count in the average over the ranks."""
        if self._rows is None:
            return list(gradients)
        return [None if gradient is None else self._weighted(self._rows, gradient) for gradient in gradients]

    def _weighted(self, rows: Rows, gradient: Any) -> Any:
        ranks = current().size
        if not self.backend.is_sparse(gradient):
            return rows.weighted(gradient, ranks)
        values = rows.weighted(gradient.values, ranks)
        return type(gradient)(values, gradient.indices, gradient.dense_shape)

    @contextmanager
    def recording(self) -> Iterator[list[Any]]:
        """Records the gradients that are applied inside, instead of applying them."""
        recorded: list[Any] = []
        with replaced(self, _recorded=recorded):
            yield recorded

    def record(self, gradients: Sequence[Any]) -> bool:
        """Returns whether gradients are recorded; these are then."""
        if self._recorded is None:
            return False
        self._recorded[:] = gradients
        return True

    def postponed(self, variables: Sequence[Any]) -> AbstractContextManager[None]:
        """Lets `reduce_postponed`, inside, reduce gradients of these variables once accumulated."""
        return replaced(self, is_done=True, _postponed=variables)

    def reduce_postponed(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the postponed gradients, reduced; returns other optimizers' gradients unchanged."""
        return self.reduce(gradients, self._postponed) if self._postponed else list(gradients)

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], scales_losses: bool = False
    ) -> list[Any]:
        """Returns the gradients of these variables (None where there is none), reduced over all ranks.

        All ranks of the process set must call it, with the same number of gradients in the same order.
        With `scales_losses`, results are not finite on any rank if a gradient that stays on one rank is not:
        all ranks must take the same decision whether to step.
        """
        self.has_reduced = True
        self.is_compiled = not self.backend.is_eager(gradients)
        if not self.is_compiled:
            current().steps.end(by=self._stepper)
        results = self.reduce_stored(gradients, variables)
        if self.ranks:
            adds_up = self._adds_up and scales_losses
            how = self.how._replace(op=Sum) if adds_up else self.how
            self._reduce_among(results, variables, scales_losses, how)
            if adds_up:
                self._overflow_as_halves(results, variables)
            results = self.backend.joined(results) if is_elastic() else results
        if self.factor != 1.0:
            for index, variable in enumerate(variables):
                if results[index] is not None and not is_stored(variable):
                    results[index] = self.backend.scaled(results[index], self.factor)
        return results

    def reduce_stored(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients, with the maxima over all ranks in the places of values that are none.

        Keras stores these unchanged, such as the maxima of 8-bit floats: they have no sum. All ranks of the
        process set must call it.
        """
        results, own = list(gradients), self.local.numbers()
        stored = [
            place
            for place, variable in enumerate(variables)
            if is_stored(variable) and id(variable) not in own
        ]
        if stored and self.ranks:
            how = GradientCombination(Max, process_set=self.how.process_set)
            self._reduce_group("stored", stored, results, variables, how)
        return results

    def mean(self, name: str, value: Any) -> Any:
        """Returns the mean of a number over the ranks, as a constant. All ranks of the set must call it."""
        name = f"{self.prefix}.{name}"
        own = [Gradient(name, keras.ops.copy(keras.ops.stop_gradient(value)))]
        if self.first_name is None:
            self.first_name = self.backend.first_name(name, own)
        return self.backend.allreduce(name, own, GradientCombination(process_set=self.how.process_set))[0]

    def divided(self, value: Any) -> Any:
        """Returns a value divided by the number of ranks if gradients are averaged, and not added up."""
        return self.backend.divided(value, self.ranks) if self.how.op == Average else value

    def divide_loss(self, loss: Any) -> Any:
        """Returns the loss of a rank that the gradients of all ranks have to be added up for, not averaged.

        In 16 bits, each row's gradients so have the range that they have in one process. They are added up
        in all later steps: a program may call this once, where it is traced, or for several steps.
        """
        self._adds_up = bool(self.ranks and self.how.op == Average and fixed_divisor(current()) is None)
        return self.divided(loss) if self._adds_up else loss

    @property
    def ranks(self) -> int:
        """Returns the number of ranks that exchange gradients with this rank; 0 if it exchanges none."""
        members = self.how.process_set.members(current())
        takes_part = current().rank in members and (len(members) > 1 or is_elastic())
        return len(members) if takes_part else 0

    @property
    def _stepper(self) -> Stepper | None:
        """The optimizer, for autotune; None if not all ranks take part in its steps, or with Adasum."""
        is_tuned = self.how.process_set is global_process_set and self.how.op != Adasum
        return Stepper(self.prefix) if is_tuned else None

    def _reduce_among(
        self, results: list[Any], variables: Sequence[Any], scales_losses: bool, how: GradientCombination
    ) -> None:
        own = self.local.numbers()
        flags = self._overflows(results, variables, own) if scales_losses else []
        divisor = fixed_divisor(current()) if how.op == Average else None
        has_divided = how.op != self.how.op  # the losses already
        exchanged: list[int] = []
        for index, variable in enumerate(variables):
            if id(variable) not in own:
                if not is_stored(variable):
                    exchanged.append(index)
            elif results[index] is not None and self.local.scale != has_divided:
                local = results[index]
                if has_divided:
                    factor = 1.0 / self.divided(keras.ops.ones((), local.dtype))
                    results[index] = self.backend.scaled(local, factor)
                elif divisor is None:
                    results[index] = self.backend.divided(local, self.ranks)
                else:
                    results[index] = self.backend.scaled(local, 1.0 / divisor)
        if divisor is not None:
            how = how._replace(op=Sum)
            for index in exchanged:
                if results[index] is not None:
                    results[index] = self.backend.scaled(results[index], 1.0 / divisor)
        parts = partitioned(exchanged, self.groups, lambda index: variables[index])
        for place, group in enumerate(parts or [[] for _ in flags]):
            extra = flags if place == 0 else []
            found = self._reduce_group(str(place), group, results, variables, how, extra)
            self._add_overflow(found, results)

    def _overflow_as_halves(self, results: list[Any], variables: Sequence[Any]) -> None:
        """Sets elements that float16 cannot hold to infinity, for variables with gradients in float16."""
        for index, variable in enumerate(variables):
            value = results[index]
            if (
                value is not None
                and id(variable) in (self.halves or ())
                and not self.backend.is_sparse(value)
            ):
                is_held = keras.ops.abs(value) < _HALF_OVERFLOW
                results[index] = keras.ops.where(is_held, value, keras.ops.full_like(value, float("inf")))

    def _overflows(self, gradients: Sequence[Any], variables: Sequence[Any], own: set[int]) -> list[Gradient]:
        """Returns a flag to reduce for local gradients: 0, or NaN if any is not finite; [] if none are local.

        Every rank with local variables must reduce the flag, even if it has no gradient.
        """
        places = [
            place
            for place, variable in enumerate(variables)
            if id(variable) in own and not is_stored(variable)
        ]
        if not places:
            return []
        given = [gradients[place] for place in places if gradients[place] is not None]
        values = [item.values if self.backend.is_sparse(item) else item for item in given]
        flag = keras.ops.zeros((), "float32")
        for value in values:
            is_finite = keras.ops.all(keras.ops.isfinite(value))
            flag = keras.ops.where(is_finite, flag, keras.ops.full((), float("nan"), "float32"))
        return [Gradient(f"{self.prefix}.overflow", flag)]

    def _add_overflow(self, flags: Sequence[Any], results: list[Any]) -> None:
        """Adds the reduced flag to a single result, a dense result if there is any."""
        present = [place for place, result in enumerate(results) if result is not None]
        dense = [place for place in present if not self.backend.is_sparse(results[place])]
        for flag in flags:
            for place in (dense or present)[:1]:
                value = keras.ops.convert_to_tensor(results[place])
                results[place] = value + keras.ops.cast(flag, value.dtype)

    def _reduce_group(
        self,
        name: str,
        indices: Sequence[int],
        results: list[Any],
        variables: Sequence[Any],
        how: GradientCombination,
        flags: Sequence[Gradient] = (),
    ) -> list[Any]:
        """Replaces the results with these indices by reduced results; returns the reduced flags."""
        compression = NoneCompressor if how.op == Max else self.compression
        gradients, undo = [], []
        for index in indices:
            value, variable = results[index], variables[index]
            is_absent = value is None
            if is_absent:
                value = keras.ops.zeros(variable.shape, variable.dtype)
            elif self.sparse_as_dense and self.backend.is_sparse(value):
                value = keras.ops.convert_to_tensor(value)
            if self.backend.is_sparse(value):
                undo.append(_UNCOMPRESSED)
            else:
                value, context = compression.compress(value)
                undo.append(context)
            gradients.append(Gradient(f"{self.prefix}.{index}.{stable_path(variable)}", value, is_absent))
        gradients += flags
        if self.first_name is None:
            self.first_name = self.backend.first_name(f"{self.prefix}.{name}", gradients)
        reduced = self.backend.allreduce(f"{self.prefix}.{name}", gradients, how)
        for index, value, context in zip(indices, reduced, undo, strict=False):  # flags follow
            restores = value is not None and context is not _UNCOMPRESSED
            results[index] = compression.decompress(value, context) if restores else value
        return reduced[len(indices) :]


_UNCOMPRESSED = object()


def is_stored(variable: Any) -> bool:
    """Returns whether Keras stores what it gets as the gradient of a variable, instead of stepping by it."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def stable_path(variable: Any) -> str:
    """Returns a variable's path, without Keras' running numbers, which may differ between ranks."""
    path = str(getattr(variable, "path", variable.name))
    return re.sub(r"_\d+(?=/|:|$)", "", path)


def stable_name(variable: Any) -> str:
    """Works like `stable_path`, also for an optimizer's variables.

    These have the running numbers of layers in the middle of their names.
    """
    return re.sub(r"_\d+(?=_)", "", stable_path(variable))


def combination(op: int, predivide: float, process_set: ProcessSet) -> GradientCombination:
    """Returns how gradients are combined; `predivide` divides before an average, and multiplies after it.

    Raises ValueError for an operation or a factor that gradients cannot be combined with, or, in an elastic
    job, a process set.
    """
    if op not in (Average, Sum):
        raise ValueError("op has to be Average or Sum: gradients of Keras can be combined in these ways only")
    how = gradient_reduction(op, predivide)
    require_all_ranks(process_set)
    return GradientCombination(op, how.prescale, how.postscale, process_set)
