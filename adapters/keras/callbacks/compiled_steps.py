"""Counts the steps that a compiled program takes, between the batches of `model.fit`."""

from __future__ import annotations

from typing import Any

from sirtaki.bindings.default_context import current
from sirtaki.keras.distributed_optimizer import distributed_of


class CompiledSteps:
    """Counts the steps of a model's distributed optimizer that are compiled; others count themselves."""

    def __init__(self) -> None:
        self._in_epoch = 0  # batches
        self._waiting = 0  # batches whose gradients have been accumulated for a step

    def begin_epoch(self) -> None:
        self._in_epoch = 0

    def end_batch(self, model: Any, batch: int, epoch_batches: int | None) -> None:
        """Counts the steps up to a batch of an epoch. With `steps_per_execution` Keras leaves out batches,
        and names some that the epoch does not have.
        """
        number = batch + 1 if epoch_batches is None else min(batch + 1, epoch_batches)
        batches, self._in_epoch = number - self._in_epoch, number
        optimizer = distributed_of(model.optimizer)
        if optimizer is None or not optimizer._exchange.is_compiled:
            return
        steps, self._waiting = divmod(self._waiting + batches, optimizer.gradient_accumulation_steps or 1)
        if steps:
            current().steps.end(steps)
