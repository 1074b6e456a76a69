"""Losses of training steps that count as in one process: sums, and means over the weights of all ranks."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from sirtaki.keras._private import is_autocast, is_training, layers_of, loss_reductions
from sirtaki.keras.distributed_optimizer import distributed_of
from sirtaki.keras.gradient_reducer import Exchange


def patch_losses() -> None:
    """Makes the losses that models are compiled with fit distributed optimizers. A second call does nothing.

    Averages of gradients are those of a mean over equally many rows. Keras also has losses that are sums over
    rows, and means over weights or over what a mask leaves, of which ranks have different numbers.
    """
    owner: Any = next(kind for kind in keras.Model.__mro__ if "compute_loss" in vars(kind))
    plain = owner.compute_loss
    if getattr(plain, "is_patched", False):
        return

    @functools.wraps(plain)
    def compute_loss(self: Any, *args: Any, **options: Any) -> Any:
        optimizer = distributed_of(self.optimizer)
        # A validation may be made by one rank alone.
        if optimizer is None or not options.get("training", True) or not is_training():
            return plain(self, *args, **options)
        exchange = optimizer._exchange
        if exchange.halves is None:
            exchange.halves = _in_float16(self)
        if exchange.is_split or not exchange.ranks:
            return plain(self, *args, **options)
        with _counting_as_one(exchange):
            return plain(self, *args, **options)

    if keras.backend.backend() == "torch":  # torch.compile looks at no frames
        compute_loss = sys.modules["torch"].compiler.disable(compute_loss)
    compute_loss.is_patched = True  # type: ignore[attr-defined]
    owner.compute_loss = compute_loss


def _in_float16(model: Any) -> set[int]:
    """Returns the `id()` of the variables whose gradients are computed in float16."""
    layers = {id(one): layer for layer in layers_of(model) for one in layer.trainable_variables}  # innermost
    return {
        id(one)
        for one in model.trainable_variables
        if id(one) in layers and layers[id(one)].compute_dtype == "float16" and is_autocast(one)
    }


@contextmanager
def _counting_as_one(exchange: Exchange) -> Iterator[None]:
    """Makes losses inside such that their average over the ranks is the loss of one process.

    A loss with a divisor that depends on the rank is exchanged for its divisor's average: one number for each
    such loss, before the gradients.
    """
    module, numbers = loss_reductions(), itertools.count()
    masked, reduced = module.apply_mask, module.reduce_values

    def share(weight: Any) -> Any:
        """Returns a rank's sum of weights, divided by the average over the ranks."""
        mean = exchange.mean(f"weights.{next(numbers)}", weight)
        return keras.ops.divide_no_nan(weight, mean)

    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = masked(sample_weight, mask, dtype=dtype, reduction=reduction)
        if mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        return weights * share(keras.ops.sum(keras.ops.cast(mask, weights.dtype)))

    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        loss = reduced(values, sample_weight, reduction)
        if not len(values.shape) or len(loss.shape):  # Keras has not reduced it
            return loss
        if reduction == "sum":
            return loss / exchange.divided(keras.ops.ones((), loss.dtype))
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            return loss * share(keras.ops.cast(keras.ops.sum(sample_weight), loss.dtype))
        return loss

    module.apply_mask, module.reduce_values = apply_mask, reduce_values
    try:
        yield
    finally:
        module.apply_mask, module.reduce_values = masked, reduced
