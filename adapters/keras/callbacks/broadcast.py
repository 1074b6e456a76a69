"""An equal start on every rank, in `model.fit`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import keras

from sirtaki.bindings.default_context import current
from sirtaki.common.hints import hint
from sirtaki.common.objects import allgather_object
from sirtaki.common.process_sets import global_process_set
from sirtaki.keras._private import layers_of
from sirtaki.keras.broadcasting import broadcast_model
from sirtaki.keras.callbacks.state import is_averaged, is_built, sync_variables
from sirtaki.keras.distributed_optimizer import distributed_of
from sirtaki.keras.stopping import require_all_to_stop


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Copies one rank's model and optimizer to all ranks, before the first batch.

    `sirtaki.keras.broadcast_model` documents what is copied; the seeds of dropout are not. A model that gets
    its weights only with its first batch, on any rank, is broadcast right after that batch: the first step of
    the other ranks is then lost. Give it an Input, or call `model.build(shape)`, to avoid that.

    At the start it checks that all ranks train the same number of epochs and batches, and after each epoch
    that they have the same model.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        """Creates the callback. `device` is accepted and ignored.

        Args:
            root_rank: the rank whose model and optimizer are copied.
            local_variables: variables that are not changed on any rank.
        """
        super().__init__()
        self._root_rank = root_rank
        self._local_variables = list(local_variables or ())
        self._is_due = False
        self._last_batch, self._is_in_epoch = -1, False
        self._steps = CompiledSteps()

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts, if all ranks have weights.

        Raises:
            ValueError: on all ranks, if they train different numbers of epochs or batches, or if a layer is
                synchronized among other ranks than the optimizer.
        """
        params = self.params or {}
        steps = None if is_averaged(self.model) else params.get("steps")  # else no rank waits in each batch
        gathered = allgather_object(_Plan(is_built(self.model), params.get("epochs"), steps))
        _check_plans(gathered)
        _hint_if_undistributed(self.model)
        _check_synchronized(self.model)
        self._is_due = not all(plan.is_built for plan in gathered)
        if not self._is_due:
            self._broadcast()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._steps.begin_epoch()
        self._last_batch, self._is_in_epoch = -1, True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._last_batch = batch
        self._steps.end_batch(self.model, batch, (self.params or {}).get("steps"))
        if self._is_due:
            self._is_due = False
            sync_variables(self.model)
            self._broadcast()

    def _broadcast(self) -> None:
        """Broadcasts from the given rank; in an elastic job from rank 0, which has the training's state."""
        root = self._root_rank if current().survivors is None else 0
        broadcast_model(self.model, root, local_variables=self._local_variables)

    def on_test_begin(self, logs: Any = None) -> None:
        """Checks an end of the training in the middle of an epoch, before other callbacks wait for all."""
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_epoch()
        optimizer = distributed_of(self.model.optimizer)
        if optimizer is not None:
            sync_variables(self.model)
            optimizer._checks.after_steps(self.model.trainable_variables)

    def _end_epoch(self) -> None:
        """Makes sure that all ranks end the training, if this one does in the middle of an epoch."""
        is_in_epoch, self._is_in_epoch = self._is_in_epoch, False
        steps = (self.params or {}).get("steps")
        if not is_in_epoch or not self.model.stop_training or steps is None or self._last_batch + 1 >= steps:
            return
        optimizer = distributed_of(self.model.optimizer)
        if optimizer is not None:
            sync_variables(self.model)
            require_all_to_stop(optimizer, optimizer._exchange)


class _Plan(NamedTuple):
    """A rank's plan for a `fit`; numbers are None if Keras does not know them."""

    is_built: bool
    epochs: int | None
    steps: int | None


def _check_plans(gathered: list[_Plan]) -> None:
    first = gathered[0]
    for rank, plan in enumerate(gathered):
        if None in (*plan, *first) or plan[1:] == first[1:]:
            continue
        raise ValueError(
            f"rank {rank} is to train {plan.epochs} epochs of {plan.steps} batches, and rank 0 "
            f"{first.epochs} of {first.steps}: in each batch every rank waits for all others. Give all ranks "
            "as many, with hvd.shard(dataset), hvd.shard_arrays(x, y) or the same steps_per_epoch"
        )


def _hint_if_undistributed(model: Any) -> None:
    """Warns if each rank trains a model of its own, unless the user's own `train_step` may exchange."""
    is_alone = distributed_of(model.optimizer) is None and not is_averaged(model)
    if current().size > 1 and current().rank == 0 and is_alone:
        hint(
            "the model's optimizer is not distributed, so each rank trains a model of its own: "
            "model.compile(hvd.DistributedOptimizer(optimizer), ...)"
        )


def _check_synchronized(model: Any) -> None:
    """Raises ValueError for a layer with statistics of all ranks where only some ranks train together."""
    optimizer = distributed_of(model.optimizer)
    if optimizer is None or optimizer._exchange.how.process_set is global_process_set:
        return
    for layer in layers_of(model):
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"layer {layer.name!r} has synchronized=True, which is among all ranks, and the optimizer "
                "has a process set: use sirtaki.tensorflow.SyncBatchNormalization(process_set=...) instead"
            )


# ---- The steps that a compiled program takes between the batches of `model.fit` ------------------------


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
