"""The training step on a part of a batch: gradients count by rows, metrics are those of the whole batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras

from sirtaki.bindings.default_context import current
from sirtaki.common.ops import Sum
from sirtaki.keras._private import metrics_of_losses
from sirtaki.keras.auto.batches import BatchPart
from sirtaki.keras.auto.random_numbers import own_random_numbers
from sirtaki.keras.backends import Gradient, GradientCombination
from sirtaki.keras.gradient_reducer import GradientReduction, Rows


def train_on_part(plain: Callable[..., Any], model: Any, *given: Any) -> Any:
    """Works like `train_step`, for a part of a batch: returns the logs of the whole batch.

    The metrics' variables are set to zero during the step, which so makes this part's contribution; the
    contributions of all ranks are then added to the state before the step. So the variables are equal on all
    ranks after each step, and so is everything that Keras and its callbacks read from them.
    """
    part: BatchPart = given[-1]
    rows = Rows(part.own, part.total)
    exchange: GradientReduction = model.optimizer._exchange
    if keras.backend.backend() == "jax":
        return _stateless(plain, model, given[0], part, rows, exchange)
    variables = model.metrics_variables
    before = [keras.ops.copy(keras.ops.convert_to_tensor(variable)) for variable in variables]
    for one in variables:
        one.assign(keras.ops.zeros_like(one))
    with exchange.counting(rows), own_random_numbers():
        plain(model, part.batch)
    own = [keras.ops.copy(keras.ops.convert_to_tensor(variable)) for variable in variables]
    if _counts_batches():
        own = _of_whole_batches(model, variables, own, rows)
    for one, value, more in zip(variables, before, _summed(exchange, own, rows), strict=True):
        one.assign(value + more)
    return model.get_metrics_result()


def _counts_batches() -> bool:
    """Returns whether the losses of single outputs count once per batch, and not once per row.

    Keras weights them by the number of rows, but TensorFlow's compiled steps do not know that number.
    """
    return keras.backend.backend() == "tensorflow" and not sys.modules["tensorflow"].executing_eagerly()


def _of_whole_batches(model: Any, variables: Sequence[Any], own: Sequence[Any], rows: Rows) -> list[Any]:
    """Returns the contributions where the losses of single outputs count by this rank's rows of one batch."""
    counts = {
        id(variable): metric.count for metric in metrics_of_losses(model) for variable in metric.variables
    }
    places = {id(variable): place for place, variable in enumerate(variables)}
    return [
        rows.weighted(value / own[places[id(counts[id(variable)])]], 1) if id(variable) in counts else value
        for variable, value in zip(variables, own, strict=True)
    ]


def _stateless(
    plain: Callable[..., Any],
    model: Any,
    state: Any,
    part: BatchPart,
    rows: Rows,
    exchange: GradientReduction,
) -> Any:
    *others, before = state
    zeros = [keras.ops.zeros_like(one) for one in before]
    with exchange.counting(rows):
        _, (*others, own) = plain(model, (*others, zeros), part.batch)
    after = [value + more for value, more in zip(before, _summed(exchange, own, rows), strict=True)]
    with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, after, strict=True))):
        logs = model.get_metrics_result()
    return logs, (*others, after)


def _summed(exchange: GradientReduction, values: Sequence[Any], rows: Rows) -> Sequence[Any]:
    """Returns the sums over the ranks that have rows."""
    if not values or current().size == 1:
        return values
    prefix = f"{exchange.prefix}.metrics"
    counted = [Gradient(f"{prefix}.{place}", rows.counted(value, 1)) for place, value in enumerate(values)]
    return exchange.backend.allreduce(prefix, counted, GradientCombination(Sum))
