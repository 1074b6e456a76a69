"""Metrics over the data of all ranks: exact, even if ranks have seen different numbers of samples."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np

from sirtaki import numpy as arrays
from sirtaki.bindings.context import current
from sirtaki.common.ops.objects import allgather_object
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Sum


class Results(NamedTuple):
    """The results of a model's metrics.

    Attributes:
        own: over the data of this rank: numbers, and arrays for metrics that have a value for each class.
        total: over the data of all ranks.
        samples: the number that this rank has seen.
    """

    own: dict[str, Any]
    total: dict[str, Any]
    samples: float


def reduce_metrics(model: Any, process_set: ProcessSet = global_process_set) -> dict[str, Any]:
    """Returns a model's metrics over the data of all ranks. All ranks of the set must call it.

    Call it after `model.evaluate()`, or when an epoch has ended: metrics keep their state until the next one
    begins. Instead of averaging results, it adds up the states of the metrics (totals and counts, the entries
    of a confusion matrix, ...) and computes the results from them, so that they equal those of one process
    with the data of all ranks.

    Args:
        model: a compiled model, with the same metrics on all ranks.
        process_set: the ranks that take part.

    Returns:
        The results by name, the same on all ranks: numbers, and arrays of numpy for metrics that have a value
        for each class.

    Raises:
        MismatchError: the ranks' metrics differ.
        PeerLostError: a rank died.

    Example:
        model.compile(loss="mse", metrics=["mae"])
        model.evaluate(inputs, targets, verbose=0)  # each rank has its own part of the test data
        metrics = hvd.reduce_metrics(model)  # {"loss": ..., "mae": ...} over the data of all ranks
    """
    return combine(model, process_set).total


def combine(model: Any, process_set: ProcessSet = global_process_set) -> Results:
    """Works like `reduce_metrics`, and also returns this rank's results. The metrics' state is unchanged."""
    own = _results(model)
    variables = [variable for metric in model.metrics for variable in metric.variables if _adds_up(variable)]
    states = [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]
    flat = np.concatenate([np.zeros(0), *(np.float64(state).ravel() for state in states)])
    totals = arrays.allreduce(flat, op=Sum, process_set=process_set)
    with _restored(variables, states):
        start = 0
        for variable, state in zip(variables, states, strict=True):
            variable.assign(totals[start : start + state.size].reshape(state.shape).astype(state.dtype))
            start += state.size
        total = _results(model)
    return Results(own, total, _samples(model))


def combine_logs(logs: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """Returns the logs over the data of all ranks: from the metrics if they come from these; else averaged by
    value.

    Averages are weighted with the number of samples; values that only some ranks have are averaged among
    those. Left out are values that are no numbers, and arrays of different shapes.
    """
    mine = {
        name: (value, _is_same(value, results.own.get(name)), results.samples)
        for name, value in _numbers(logs).items()
    }
    gathered = allgather_object(mine)
    combined = {}
    for name in mine:
        entries = [theirs[name] for theirs in gathered if name in theirs]
        values = [value for value, _, _ in entries]
        if all(is_own for _, is_own, _ in entries):
            combined[name] = results.total[name]
        elif all(np.array_equal(value, values[0]) for value in values):
            combined[name] = values[0]
        elif len({np.shape(value) for value in values}) == 1:
            weights = [samples for _, _, samples in entries]
            weights = weights if sum(weights) > 0 else [1.0] * len(entries)
            combined[name] = sum(map(operator.mul, values, weights)) / sum(weights)
    return combined


@contextmanager
def _restored(variables: list[Any], states: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for variable, state in zip(variables, states, strict=True):
            variable.assign(state)


def _adds_up(variable: Any) -> bool:
    """Returns whether Keras adds up the states of several replicas: its default for metrics."""
    return getattr(variable, "aggregation", "sum") == "sum"


def _results(model: Any) -> dict[str, Any]:
    return _numbers(model.get_metrics_result())


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numeric values: numbers as floats, arrays and tensors as arrays."""
    return {name: _number(value) for name, value in values.items() if _is_number(value)}


def _number(value: Any) -> Any:
    array = np.asarray(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value)
    return array if array.shape else float(array)


def _samples(model: Any) -> float:
    """Returns the weight of the mean loss, which Keras counts in samples."""
    for metric in model.metrics:
        if isinstance(metric, keras.metrics.Mean):
            return float(keras.ops.convert_to_numpy(metric.count))
    return 0.0


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, int | float | np.number) or keras.ops.is_tensor(value)


def _is_same(value: Any, other: Any) -> bool:
    is_alike = other is not None and np.shape(value) == np.shape(other)
    return is_alike and np.allclose(value, other, rtol=1e-6, atol=0, equal_nan=True)


# ---- A single progress bar, instead of one per rank ----------------------------------------------------


def verbose(level: Any = "auto") -> Any:
    """Returns the `verbose` argument for `fit` and `evaluate`: `level` on rank 0, 0 on all other ranks.

    Raises:
        NotInitializedError: init() has not been called.

    Example:
        model.compile(loss="mse")
        model.evaluate(inputs, targets, verbose=hvd.verbose(2))  # only rank 0 prints
    """
    return level if current().rank == 0 else 0
