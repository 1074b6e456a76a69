"""Checks that ranks have the same arrays, for every library with arrays that numpy can read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from sirtaki.bindings.context import Context, add_survivor, current
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops.process_sets import ProcessSet
from sirtaki.common.ops.requests import Max, Min
from sirtaki.common.training import consistency
from sirtaki.common.training.consistency import Options, Scope, Spread, checksum
from sirtaki.common.training.round_checks import RoundChecks
from sirtaki.numpy.arrays import row_major_view
from sirtaki.numpy.collectives import allreduce

_PLAIN = (str, bool, type(None), Real)
Named = Iterable[tuple[str, Any]]


class Subject(NamedTuple):
    """The values that must be equal on all ranks: arrays by name, and hyper-parameters.

    Attributes:
        named: returns the arrays, in an order that is the same on all ranks.
        rates: returns the learning rates.
        options: returns the hyper-parameters; those that are not plain values are ignored.
    """

    named: Callable[[], Named]
    rates: Callable[[], Sequence[float]] = tuple
    options: Callable[[], dict[str, Any]] = dict


class Arrays:
    """A subject in the form that `sirtaki.common.training.consistency` compares."""

    def __init__(self, scope: Scope, subject: Subject) -> None:
        self.subject = subject
        self._scope = scope

    def _named(self) -> list[tuple[str, Any]]:
        return [(name, np.asarray(value)) for name, value in self.subject.named()]

    def names(self) -> Sequence[str]:
        return [name for name, _ in self._named()]

    def kinds(self) -> Sequence[str]:
        return [f"{array.dtype} of shape {list(array.shape)}" for _, array in self._named()]

    def checksums(self) -> Sequence[int]:
        return [checksum_of(array) for _, array in self._named()]

    def spread(self, index: int) -> Spread:
        array = self._named()[index][1]
        if array.dtype.kind == "c":
            array = array.view(array.real.dtype)
        values = array.astype(np.float64)
        name = f"{self._scope.name}.extreme"
        minimum, maximum = (
            allreduce(values, op=op, name=name, process_set=self._scope.process_set) for op in (Min, Max)
        )
        scale = np.maximum(np.abs(minimum), np.abs(maximum)).max(initial=0.0)
        return Spread(float((maximum - minimum).max(initial=0.0)), float(scale), _epsilon(array.dtype))

    def rates(self) -> Sequence[float]:
        return self.subject.rates()

    def options(self) -> Options:
        options = self.subject.options().items()
        return [{name: value for name, value in options if isinstance(value, _PLAIN)}]


def checksum_of(array: Any) -> int:
    """Returns the checksum of an array; 0 for a dtype that cannot be exchanged and so is not compared."""
    try:
        return checksum(row_major_view(array))
    except UnsupportedError:
        return 0


def _epsilon(dtype: Any) -> float:
    if dtype.kind in "iub":
        return 0.0
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-7  # bfloat16's


def check(subject: Subject, remedy: str, process_set: ProcessSet) -> None:
    """Compares arrays over the ranks of the set now. All of them must call it.

    Args:
        subject: the values that must be equal.
        remedy: the call that makes them equal, as the message shows it.
        process_set: the ranks that take part.

    Raises:
        ParametersDifferError: they differ; on all ranks, with the same text.
        PeerLostError: a rank died.
    """
    context = current()
    if len(process_set.members(context)) > 1:
        scope = Scope(context, process_set, "check_parameters", remedy)
        arrays = Arrays(scope, subject)
        consistency.check(scope, arrays, arrays.options())


class EagerChecks:
    """The checks around a series of exchanges, such as an optimizer's, in whatever world exists."""

    def __init__(self, name: str, remedy: str, first_check: int = 2) -> None:
        """Creates the checks, before the first exchange.

        Args:
            name: identifies the comparisons on all ranks.
            remedy: as for `check`.
            first_check: the first exchange that compares arrays, counted from 1.
        """
        self._name, self._remedy, self._first_check = name, remedy, first_check
        self._context: Context | None = None
        add_survivor(self)
        self._arrays: Arrays
        self._checks: RoundChecks | None = None

    def move_to(self, context: Context) -> None:
        """Begins again in another world."""
        self.retire()

    def retire(self) -> None:
        """Drops the world of the comparisons so far."""
        self._context = None
        self._checks = None

    @contextmanager
    def around(
        self, process_set: ProcessSet, subject: Subject, gradients: Callable[[], Iterable[Any]] = tuple
    ) -> Iterator[None]:
        """Compares during the exchange of gradients inside the context. All ranks of the set must enter it.

        Args:
            process_set: the ranks that take part.
            subject: the values that must be equal now.
            gradients: returns those of this rank, as arrays or None.

        Raises:
            ParametersDifferError: parameters or learning rates differ; on all ranks, with the same text.
        """
        context = current()
        members = process_set.members(context)
        if len(members) == 1 or context.rank not in members:
            yield
            return
        checks = self._begin(context, process_set, subject)
        if checks.wants_gradients:
            for index, gradient in enumerate(gradients()):
                if gradient is not None and np.any(np.asarray(gradient)):
                    checks.note_gradient(index, checksum_of(np.asarray(gradient)))
        checks.start()
        try:
            yield
            checks.finish()
        except BaseException:
            checks.discard()
            raise
        checks.report()

    def _begin(self, context: Context, process_set: ProcessSet, subject: Subject) -> RoundChecks:
        if self._checks is None or self._context is not context:
            scope = Scope(context, process_set, self._name, self._remedy)
            self._context, self._arrays = context, Arrays(scope, subject)
            self._checks = RoundChecks(scope, self._arrays, self._first_check)
        self._arrays.subject = subject
        return self._checks
