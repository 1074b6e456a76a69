"""The proof that the parts of a batch make the whole: gradients, metrics and state are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from sirtaki import numpy as arrays
from sirtaki.bindings.context import Context
from sirtaki.common.ops.requests import Sum
from sirtaki.common.training.shares import Share
from sirtaki.keras._private import layers_of
from sirtaki.keras.auto.batches import TrainingBatch, part_of
from sirtaki.keras.auto.probing import Probe, probe
from sirtaki.keras.auto.refusals import agree

# Relative differences that rounding explains. A loss that cannot be split differs by 0.05 and more.
# Keras divides some losses in float32, also if all variables are float64.
_ROUNDING = {"float64": 1e-6, "float32": 2e-3, "float16": 5e-2, "bfloat16": 5e-2}
_OF_METRICS = 0.02  # a prediction at a threshold may fall on either side of it
_NAME = "sirtaki.auto.proof.{}"


def prove(context: Context, plain: Callable[..., Any], model: Any, batch: TrainingBatch, where: str) -> bool:
    """Compares the model's step on a batch with its steps on the ranks' parts. All ranks call it.

    Args:
        context: this rank.
        plain: Keras' `train_step`.
        model: the model, with equal weights on all ranks.
        batch: the batch.
        where: the user's line that trains.

    Returns:
        Whether the gradients are finite; if not, nothing is proven.

    Raises:
        UnsupportedError: on all ranks, they differ.
    """
    whole = probe(plain, model, batch.rows(slice(0, batch.total)))
    refusal, part = None, None
    try:
        part = probe(plain, model, part_of(context, batch).batch)
    except Exception as error:
        text = " ".join(str(error).split())
        refusal = (
            f"a part of {Share(context, batch.total).count or 1} of the {batch.total} rows of a batch cannot "
            f"be computed: {type(error).__name__}: {text:.400}; a model must not be made for a fixed batch "
            "size (batch_size= or batch_shape= of an Input, stateful=True)"
        )
    agree(context, _NAME.format("parts"), refusal and f"{where}: {refusal}")
    assert part is not None
    share = Share(context, batch.total)
    gradients = _combined(context, "gradients", part.gradients, share.weight)
    metrics = _combined(context, "metrics", part.metrics, float(share.count > 0))
    comparison = _Comparison(model, whole, part, share)
    refusal = comparison.refusal(gradients, metrics)
    agree(context, _NAME.format("results"), refusal and f"{where}: {refusal}")
    return all(np.isfinite(gradient).all() for gradient in whole.gradients if gradient is not None)


def _combined(context: Context, name: str, values: Sequence[Any], weight: float) -> list[Any]:
    """Returns the weighted sums of values over the ranks, which may have none of some."""
    flat = [np.zeros(0), *(np.float64(value).ravel() for value in values if value is not None)]
    mine = np.concatenate(flat) * weight if weight else np.zeros(sum(map(len, flat)))
    summed, start = arrays.allreduce(mine, op=Sum, name=_NAME.format(name)), 0
    results: list[Any] = []
    for item in values:
        results.append(None if item is None else summed[start : start + item.size].reshape(item.shape))
        start += 0 if item is None else item.size
    return results


class _Comparison:
    """The comparison of a step on a whole batch with the steps on its parts."""

    def __init__(self, model: Any, whole: Probe, part: Probe, share: Share) -> None:
        self._model, self._whole, self._part, self._share = model, whole, part, share

    def refusal(self, gradients: Sequence[Any], metrics: Sequence[Any]) -> str | None:
        """Returns why the training cannot be split; None: it can."""
        return (
            self._of_state()
            or (f"this training cannot be split: {self._whole.means[0]}" if self._whole.means else None)
            or self._of_gradients(gradients)
            or self._of_metrics(metrics)
            or self._of_logs()
        )

    def _of_state(self) -> str | None:
        variables = self._model.non_trainable_variables
        for variable, whole, part in zip(variables, self._whole.state, self._part.state, strict=True):
            if whole.shape == part.shape and self._is_close(whole, part):
                continue
            layer = self._owner(variable)
            name = f"layer {layer.name!r} ({type(layer).__name__})" if layer is not None else variable.path
            advice = "use a layer that treats rows independently"
            if isinstance(layer, keras.layers.BatchNormalization):
                advice = (
                    "use GroupNormalization or LayerNormalization, or freeze it (layer.trainable = False)"
                )
            return (
                f"{name} computes statistics of the batch ({variable.name}), and a rank has only its rows of "
                f"it; {advice}"
            )
        return None

    def _of_gradients(self, combined: Sequence[Any]) -> str | None:
        pairs = list(zip(self._model.trainable_variables, self._whole.gradients, combined, strict=True))
        norms = [
            0.0 if gradient is None else float(np.linalg.norm(np.float64(gradient)))
            for _, gradient, _ in pairs
        ]
        largest = max(norms, default=0.0)
        if not np.isfinite(largest):
            return None
        for (variable, whole, parts), norm in zip(pairs, norms, strict=True):
            if (whole is None) != (parts is None):
                return f"variable {variable.path} has a gradient on some rows only, not in every part"
            if whole is None:
                continue
            difference = float(np.linalg.norm(np.float64(whole) - parts))
            if difference <= self._tolerance() * max(norm, 1e-3 * largest):
                continue
            return (
                "the ranks' gradients on their rows do not make the gradient on the whole batch (variable "
                f"{variable.path} differs by {difference / max(norm, 1e-300):.2g} of its norm): "
                f"{self._cause(whole, parts)}"
            )
        return None

    def _cause(self, whole: Any, parts: Any) -> str:
        ratio = float(np.vdot(whole, parts) / max(np.vdot(parts, parts), 1e-300))
        sums = [name for name, reduction in _losses(self._model) if reduction == "sum"]
        if sums or abs(ratio - self._share.context.size) < 0.05 * self._share.context.size:
            named = f"the loss {sums[0]!r}" if sums else "the loss, or what add_loss() is given,"
            return (
                f'{named} is a sum over the rows, and has to be a mean: reduction="sum_over_batch_size" for '
                "a loss of Keras (and a learning rate times the batch size), keras.ops.mean() in a function"
            )
        names = ", ".join(repr(name) for name, _ in _losses(self._model)) or "of add_loss()"
        return (
            f"the loss ({names}), an activity regulariser or a layer relates rows of the batch to each other "
            "(negatives or normalisation within the batch, a mean over a mask, class weights that are "
            "normalised), or reduces the wrong axis; write losses as a mean over rows"
        )

    def _of_metrics(self, combined: Sequence[Any]) -> str | None:
        places = {id(variable): place for place, variable in enumerate(self._model.metrics_variables)}
        for metric in _single_metrics(self._model):
            for variable in metric.variables:
                place = places[id(variable)]
                whole, parts = np.float64(self._whole.metrics[place]), combined[place]
                difference = np.abs(whole - parts).sum()
                if not np.isfinite(difference) or difference <= _OF_METRICS * np.abs(whole).sum() + 1e-12:
                    continue
                return (
                    f"metric {metric.name!r} cannot be combined from the ranks' rows: its variable "
                    f"{variable.name!r} on the whole batch is not the sum of those on the parts; a function "
                    "has to return a value for each row instead of one for the batch, and a class of metrics "
                    "has to add up totals and counts over rows"
                )
        return None

    def _of_logs(self) -> str | None:
        known = set(self._model.get_metrics_result())
        if odd := self._whole.logs - known:
            return (
                f"compute_metrics() of the model returns {sorted(odd)[0]!r}, which no metric of the model "
                "holds, so it would be that of this rank's rows; make it a keras.metrics.Metric"
            )
        return None

    def _is_close(self, value: Any, other: Any) -> bool:
        if value.dtype.kind not in "fV":
            return bool((value == other).all())
        value, other = np.float64(value), np.float64(other)
        return bool(np.linalg.norm(value - other) <= 1e-5 * np.linalg.norm(value) + 1e-12)

    def _tolerance(self) -> float:
        kinds = {str(getattr(layer, "compute_dtype", "float32")) for layer in layers_of(self._model)}
        kinds |= {str(gradient.dtype) for gradient in self._whole.gradients if gradient is not None}
        kinds.add(keras.config.floatx())
        return max(_ROUNDING.get(kind, 0.0) for kind in kinds)

    def _owner(self, variable: Any) -> Any:
        for layer in reversed(layers_of(self._model)):
            if any(item is variable for item in layer.variables):
                return layer
        return None


def _losses(model: Any) -> list[tuple[str, Any]]:
    """Returns names and reductions of the losses that the model has been compiled with."""
    given = [leaf for leaf in keras.tree.flatten(model.loss) if leaf is not None]
    return [
        (str(value if isinstance(value, str) else getattr(value, "name", getattr(value, "__name__", value))),
         getattr(value, "reduction", None))
        for value in given
    ]  # fmt: skip


def _single_metrics(model: Any) -> list[Any]:
    """Returns a model's metrics, with the metrics given to `compile` in place of their container."""
    found: list[Any] = []
    for metric in model.metrics:
        found += getattr(metric, "metrics", None) or [metric]
    return found
