"""Checkpoints that one rank writes, in `model.fit`."""

from __future__ import annotations

from typing import Any

import keras

from sirtaki.bindings.default_context import current
from sirtaki.common.objects import broadcast_object
from sirtaki.keras.sharded.full_state import saving_whole


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model whenever a metric reaches a new best value; rank 0 does so for all.

    When the epoch ends on any rank, the file is complete, and `best` is the same on all ranks. Place it after
    MetricAverageCallback, or rank 0 judges by its own part of the data.
    """

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        **options: Any,
    ) -> None:
        """Works like `keras.callbacks.ModelCheckpoint` with `save_best_only=True`."""
        how = {"save_weights_only": save_weights_only, "mode": mode, "save_freq": save_freq}
        super().__init__(filepath, monitor=monitor, verbose=verbose, save_best_only=True, **how, **options)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if current().rank == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        with saving_whole(self.model):
            if current().rank == 0:
                super().on_epoch_end(epoch, logs)
        self.best: Any = broadcast_object(self.best)
