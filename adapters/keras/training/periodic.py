"""The average of a model's variables over all ranks, each with the weight of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from sirtaki import numpy as arrays
from sirtaki.bindings.context import current
from sirtaki.common.ops.requests import Sum
from sirtaki.keras._private import layers_of


class AveragePart(NamedTuple):
    """The contribution of a rank to an average.

    Attributes:
        weight: its weight, 1.0 for a complete window of batches.
        has_ended_epoch: whether this rank has no batches left in its epoch, and waits for the others.
        has_ended: whether it has none left in its training.
    """

    weight: float
    has_ended_epoch: bool = False
    has_ended: bool = False


class AverageOutcome(NamedTuple):
    """The state of all ranks, equal on all of them.

    Attributes:
        all_have_ended_epoch: whether no rank has batches left in its epoch.
        all_have_ended: whether none has any left.
    """

    all_have_ended_epoch: bool
    all_have_ended: bool


class Averager:
    """Replaces a model's variables by their averages, or by the result of an outer optimizer's step.

    The outer optimizer's gradient is the average difference between the variables after the last average and
    those of the ranks. The statistics of normalisation are averaged.
    """

    def __init__(self, model: Any, outer: Any, name: str) -> None:
        """The variables have to be equal on all ranks now, and the outer optimizer built for them."""
        self._outer, self._name = outer, name
        self._trainable = list(model.trainable_variables)
        self._statistics = _statistics_of(model)
        self._whole = _values(self._trainable) if outer is not None else []

    def average(self, part: AveragePart) -> AverageOutcome:
        """Averages the current values. All ranks must call it."""
        own = _values(self._trainable)
        if self._outer is not None:
            own = [whole - value for whole, value in zip(self._whole, own, strict=True)]
        # The last number counts the ranks that take part: those that have joined contribute zeros.
        header = np.array([*part, 1.0], np.float64)
        # Divided by the number of ranks, no sum of weighted values leaves the range of 16 bits.
        values = [*own, *_values(self._statistics)]
        shares = [1.0 / current().size if value.dtype.itemsize == 2 else 1.0 for value in values]
        sent = [_weighted(value, part.weight * share) for value, share in zip(values, shares, strict=True)]
        found, *sums = arrays.grouped_allreduce([header, *sent], op=Sum, name=self._name)
        weight, ended_epoch, ended, present = found.tolist()
        if weight:
            pairs = zip(sums, shares, strict=True)
            averages = [np.divide(array, weight * share, dtype=array.dtype) for array, share in pairs]
            self._apply(averages[: len(own)])
            _assign(self._statistics, averages[len(own) :])
        elif self._outer is not None:
            _assign(self._trainable, self._whole)
        return AverageOutcome(ended_epoch == present, ended == present)

    def _apply(self, averages: Sequence[Any]) -> None:
        if self._outer is None:
            _assign(self._trainable, averages)
            return
        _assign(self._trainable, self._whole)
        gradients = [keras.ops.convert_to_tensor(average) for average in averages]
        self._outer.apply(gradients, self._trainable)
        self._whole = _values(self._trainable)


def _statistics_of(model: Any) -> list[Any]:
    """Returns the floating variables that are no parameters, of layers that are not frozen."""
    frozen = {id(weight) for layer in layers_of(model) if not layer.trainable for weight in layer.weights}
    return [
        weight
        for weight in model.non_trainable_weights
        if id(weight) not in frozen and "float" in keras.backend.standardize_dtype(weight.dtype)
    ]


def _values(variables: Sequence[Any]) -> list[Any]:
    """Returns copies."""
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _weighted(array: Any, weight: float) -> Any:
    """Multiplies. Elements that are not finite count as zero in a rank that has no weight."""
    if weight == 0:
        return np.zeros_like(array)
    return array if weight == 1 else np.multiply(array, weight, dtype=array.dtype)
