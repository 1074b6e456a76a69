"""Metrics over all ranks, in `model.fit`."""

from __future__ import annotations

from typing import Any
from weakref import ref

import keras

from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import current
from sirtaki.common.hints import hint
from sirtaki.common.objects import allgather_object
from sirtaki.keras.metrics import Results, combine, combine_logs


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's logs, of training and validation, by the values over the data of all ranks.

    They are exact, even if ranks have seen different numbers of samples: `sirtaki.keras.reduce_metrics`
    documents how. Logs that do not come from the model's metrics are averaged by value, weighted with the
    number of samples.

    Place it before the callbacks that read the logs (ReduceLROnPlateau, EarlyStopping, BestModelCheckpoint,
    ...): they then act alike on all ranks.
    """

    def __init__(self, device: str = "") -> None:
        """Creates the callback. `device` is accepted and ignored."""
        super().__init__()
        self._training_in: ref[Context] | None = None  # the world of the epoch in progress
        self._looked_in: ref[Context] | None = None  # the world in which losses have been compared
        self._training: Results | None = None
        self._validation: Results | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._training_in = ref(current())
        self._training = self._validation = None

    def _is_training(self) -> bool:
        """Returns whether this is within an epoch; one that ended with its world does not count."""
        return _is_here(self._training_in)

    def on_test_begin(self, logs: Any = None) -> None:
        """Prepares for a validation: the metrics still have the state of the training."""
        if self._is_training() and self._training is None:
            self._training = combine(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        if self._is_training():
            self._validation = combine(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._training_in = None
        logs = {} if logs is None else logs
        if not _is_here(self._looked_in):
            self._looked_in = ref(current())
            _hint_at_same_data(logs.get("loss"))
        training = self._training or combine(self.model)
        own = {name: value for name, value in logs.items() if not name.startswith("val_")}
        validation = {name: value for name, value in logs.items() if name.startswith("val_")}
        logs.update(combine_logs(own, training))
        logs.update(combine_logs(validation, _prefixed(self._validation or training)))


def _is_here(world: ref[Context] | None) -> bool:
    return world is not None and world() is current()


def _hint_at_same_data(loss: Any) -> None:
    """Warns if all ranks had the same loss over an epoch, which means that they had the same batches."""
    losses = allgather_object(loss)
    if len(losses) > 1 and len(set(losses)) == 1 and loss and current().rank == 0:
        hint(
            f"over an epoch, all {len(losses)} ranks have had the same loss, as if from the same batches: "
            "together they learn what one of them would. Give each rank its own part of the data, with "
            "hvd.shard_arrays(x, y) or hvd.shard(dataset)"
        )


def _prefixed(results: Results) -> Results:
    own, total = ({f"val_{name}": value for name, value in part.items()} for part in results[:2])
    return Results(own, total, results.samples)
