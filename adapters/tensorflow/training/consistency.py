"""Checks that ranks have the same variables, where TensorFlow runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import ref

import tensorflow as tf

from sirtaki.bindings.context import Context, current
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.numpy import consistency
from sirtaki.numpy.consistency import EagerChecks, Subject

_BROADCAST = "hvd.broadcast_variables(model.variables, root_rank=0)"


def check_parameters(variables: Iterable[Any], process_set: ProcessSet = global_process_set) -> None:
    """Makes sure that all ranks of the set have the same variables. All of them must call it, outside of
    functions.

    It reads all variables and sends 8 bytes; more only if they differ. `DistributedGradientTape` does this by
    itself, once, if it runs eagerly; in a tf.function it cannot.

    Args:
        variables: of TensorFlow's or Keras', in the same order on all ranks.
        process_set: the ranks that take part.

    Raises:
        ParametersDifferError: they differ. All ranks raise it, with the same text: which variables differ, on
            which ranks, and by how much.
        PeerLostError: a rank died.

    Example:
        hvd.broadcast_variables(model.variables, root_rank=0)
        # ... the first steps of the training
        hvd.check_parameters(model.variables)
    """
    given = list(variables)
    consistency.check(Subject(lambda: _named(given)), _BROADCAST, process_set)


class _Series:
    """The checks of the exchanges for a list of variables."""

    def __init__(self, name: str, variables: Sequence[Any]) -> None:
        self.checks = EagerChecks(name, _BROADCAST)
        self._variables = [ref(variable) for variable in variables]

    def is_of(self, variables: Sequence[Any]) -> bool:
        """Returns whether it is for these objects, and not for earlier objects with the same ids."""
        return all(known() is variable for known, variable in zip(self._variables, variables, strict=True))

    @property
    def has_ended(self) -> bool:
        return any(known() is None for known in self._variables)


class _AllSeries:
    """The series of a world. All ranks create the same series in the same order, and so number them alike."""

    def __init__(self) -> None:
        self._world: ref[Context] | None = None
        self._found: dict[tuple[int, ...], _Series] = {}

    def find(self, context: Context, process_set: int, variables: Sequence[Any]) -> _Series:
        if self._world is None or self._world() is not context:
            self._world, self._found = ref(context), {}
        key = (process_set, *map(id, variables))
        series = self._found.get(key)
        if series is None or not series.is_of(variables):
            self._found = {key: item for key, item in self._found.items() if not item.has_ended}
            name = f"check of tape {process_set}.{context.next_number(f'tensorflow.tape.{process_set}')}"
            series = self._found[key] = _Series(name, variables)
        return series


_series = _AllSeries()  # of the present world


def reduce_checked(
    reduce: Callable[[], list[Any]],
    gradients: Sequence[Any],
    variables: Sequence[Any],
    process_set: ProcessSet,
) -> list[Any]:
    """Returns the result of `reduce()`, an exchange of the gradients of these variables, which is checked if
    it is made eagerly.

    Tapes live for one step, so an exchange is identified across steps by its variables.
    """
    if not (tf.executing_eagerly() and variables):
        return reduce()
    context = current()
    series = _series.find(context, process_set.number(context), variables)
    subject = Subject(lambda: _named(variables))
    with series.checks.around(process_set, subject, lambda: _arrays(gradients)):
        return reduce()


def _named(variables: Iterable[Any]) -> list[tuple[str, Any]]:
    return [
        (f"{place}: {getattr(variable, 'path', None) or variable.name.partition(':')[0]}", variable.numpy())
        for place, variable in enumerate(variables)
    ]


def _arrays(gradients: Iterable[Any]) -> Iterator[Any]:
    for gradient in gradients:
        yield None if gradient is None else tf.convert_to_tensor(gradient).numpy()
