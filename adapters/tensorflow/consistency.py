"""Checks that ranks have the same variables, where TensorFlow runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import ref

import tensorflow as tf

from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.numpy import consistency
from sirtaki.numpy.consistency import EagerChecks, Subject

_BROADCAST = "hvd.broadcast_variables(model.variables, root_rank=0)"
_MOST_SERIES = 64  # programs that make new variables all the time are not followed for ever


def check_parameters(variables: Iterable[Any], process_set: ProcessSet = global_process_set) -> None:
    """Makes sure that all ranks of the set have the same variables. All of them must call it, outside of
    functions.

    It reads all variables and sends 8 bytes; more only if they differ. `DistributedGradientTape` does this
    by itself, once, where it runs eagerly; in a tf.function it cannot.

    Args:
        variables: of TensorFlow's or Keras', in the same order on all ranks.
        process_set: the ranks that take part.

    Raises:
        ParametersDifferError: they differ. All ranks raise it, with the same text: which variables differ, on
            which ranks, and by how much.
        PeerLostError: a rank died.
    """
    given = list(variables)
    consistency.check(Subject(lambda: _named(given)), _BROADCAST, process_set)


class _Series:
    """The checks of the exchanges for one list of variables."""

    def __init__(self, number: int, first: Any) -> None:
        self.first = ref(first)
        self.checks = EagerChecks(f"check of gradients {number}", _BROADCAST)


_series: dict[tuple[Any, ...], _Series] = {}


def reduce_checked(
    reduce: Callable[[], list[Any]],
    gradients: Sequence[Any],
    variables: Sequence[Any],
    process_set: ProcessSet,
) -> list[Any]:
    """The result of `reduce()`, an exchange of the gradients of these variables, which is checked if it is
    made eagerly.

    Tapes live for one step, so it is by its variables that an exchange is recognised in the next one.
    """
    if not (tf.executing_eagerly() and variables):
        return reduce()
    key = (id(process_set), *map(id, variables))
    series = _series.get(key)
    if series is None or series.first() is not variables[0]:
        if len(_series) == _MOST_SERIES:
            return reduce()
        series = _series[key] = _Series(len(_series), variables[0])
    subject = Subject(lambda: _named(variables))
    with series.checks.around(process_set, subject, lambda: _arrays(gradients)):
        return reduce()


def _named(variables: Iterable[Any]) -> list[tuple[str, Any]]:
    return [
        (f"{place}: {getattr(one, 'path', None) or one.name.partition(':')[0]}", one.numpy())
        for place, one in enumerate(variables)
    ]


def _arrays(gradients: Iterable[Any]) -> Iterator[Any]:
    for one in gradients:
        yield None if one is None else tf.convert_to_tensor(one).numpy()
