"""One training step that changes nothing: its gradients, and its effect on variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from sirtaki.keras._private import loss_reductions, replaced
from sirtaki.keras.auto.random_numbers import expected_values

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclass
class Probe:
    """The effect of a step.

    Attributes:
        gradients: as the optimizer would get them; None for a variable without one.
        state: the values after the step of variables that are not trained, without those of metrics.
        metrics: the values after the step of the metrics' variables, which are zero before it.
        logs: the names of the step's results.
        means: why a loss is no mean over rows, although it looks like one.
    """

    gradients: list[Any]
    state: list[Any]
    metrics: list[Any]
    logs: set[str]
    means: list[str] = field(default_factory=list)


def probe(plain: Callable[..., Any], model: Any, batch: Any) -> Probe:
    """Returns the effect of the model's own training step on a batch. No variable is changed.

    Random numbers are replaced by their means.
    """
    with expected_values(), _odd_means() as means:
        found = (_stateless if keras.backend.backend() == "jax" else _stateful)(plain, model, batch)
    found.means = means
    return found


def _stateful(plain: Callable[..., Any], model: Any, batch: Any) -> Probe:
    others, metrics = list(model.non_trainable_variables), list(model.metrics_variables)
    before = [(item, arrays_of([item])[0]) for item in [*others, *metrics]]
    for metric in metrics:
        metric.assign(keras.ops.zeros_like(metric))
    try:
        with model.optimizer._exchange.recording() as gradients:
            logs = plain(model, batch)
        # A subclassed model makes its variables in its first step.
        return Probe(
            arrays_of(gradients),
            arrays_of(model.non_trainable_variables),
            arrays_of(model.metrics_variables),
            set(logs),
        )
    finally:
        for item, value in before:
            item.assign(value)


def _stateless(plain: Callable[..., Any], model: Any, batch: Any) -> Probe:
    import jax

    def step(state: Any, given: Any) -> Any:
        with model.optimizer._exchange.recording():
            return plain(model, state, given)

    trained, others, of_optimizer, metrics = (
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    state = (trained, others, of_optimizer, [keras.ops.zeros_like(metric) for metric in metrics])
    logs, (_, others, gradients, metrics) = (step if model.run_eagerly else jax.jit(step))(state, batch)
    return Probe(arrays_of(gradients), arrays_of(others), arrays_of(metrics), set(logs))


def arrays_of(tensors: Any) -> list[Any]:
    """Returns copies of tensors or variables as arrays of numpy."""
    return [
        None if tensor is None else np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(tensor)))
        for tensor in tensors
    ]


@contextmanager
def _odd_means() -> Iterator[list[str]]:
    """Notes the losses inside that divide by another number than that of the rows' elements."""
    module, found = loss_reductions(), list[str]()
    masked, reduced = module.apply_mask, module.reduce_values

    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        if mask is not None and reduction in _MEANS:
            found.append(
                "the loss is a mean over what a mask leaves (of Masking, or of Embedding with "
                "mask_zero=True), and the ranks' rows have different numbers of that"
            )
        return masked(sample_weight, mask, dtype, reduction)

    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        if sample_weight is not None and reduction == "mean_with_sample_weight":
            found.append(
                'a loss with reduction="mean_with_sample_weight" divides by the sum of the sample weights, '
                'which differs between the ranks\' rows: use reduction="sum_over_batch_size"'
            )
        return reduced(values, sample_weight, reduction)

    with replaced(module, apply_mask=apply_mask, reduce_values=reduce_values):
        yield found
