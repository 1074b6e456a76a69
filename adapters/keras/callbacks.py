"""Callbacks for `model.fit`. All ranks must use the same callbacks, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import keras
import numpy as np

from sirtaki.bindings.context import Context, current
from sirtaki.common.basics import should_stop
from sirtaki.common.ops.objects import allgather_object, broadcast_object
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.ops.requests import Min
from sirtaki.common.semantics import hint
from sirtaki.keras._private import layers_of
from sirtaki.keras.broadcasting import broadcast_model
from sirtaki.keras.metrics import Results, combine, combine_logs
from sirtaki.keras.training.consistency import check_before_local_steps, require_all_to_stop
from sirtaki.keras.training.optimizer import distributed_of
from sirtaki.keras.training.periodic import AverageOutcome, AveragePart, Averager
from sirtaki.keras.training.sharded.optimizer import saving_whole
from sirtaki.numpy.collectives import allreduce

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalSGDCallback",
    "MetricAverageCallback",
    "StopOnSignal",
    "TerminateOnNaN",
]


# ---- The end of a training whose loss is no number, in `model.fit` -------------------------------------


class TerminateOnNaN(keras.callbacks.Callback):
    """Ends the training on all ranks after a batch in which the loss of any rank was NaN or infinite.

    The callback of Keras with this name ends it on that rank only, for which the others would wait. This one
    sends 4 bytes after each batch.

    Example:
        start, end = hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.TerminateOnNaN()
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        model.fit(hvd.shard_arrays(inputs, targets), callbacks=[start, end])
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        context = current()
        loss: Any = (logs or {}).get("loss", 0.0)
        is_valid = bool(np.isfinite(loss))
        mine = np.array([context.size if is_valid else context.rank], np.int32)
        rank = int(allreduce(mine, op=Min, name="TerminateOnNaN")[0])
        if rank == context.size:
            return
        self.model.stop_training = True
        if rank == context.rank:
            print(f"batch {batch}: the loss of rank {rank} is {loss}, so all ranks end the training")


class StopOnSignal(keras.callbacks.Callback):
    """Ends the training on all ranks after the same batch, if any rank was asked to end (`hvd.should_stop`).

    After `fit`, `hvd.should_stop()` returns whether that was the reason.

    Example:
        start, stop = hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.StopOnSignal()
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        model.fit(hvd.shard_arrays(inputs, targets), callbacks=[start, stop])
        if hvd.should_stop():
            hvd.save_model(model, "stopped.keras")
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if should_stop():
            self.model.stop_training = True


# ---- Checkpoints that one rank writes, in `model.fit` --------------------------------------------------


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model whenever a metric reaches a new best value; rank 0 does so for all.

    When the epoch ends on any rank, the file is complete, and `best` is the same on all ranks. Place it after
    MetricAverageCallback, or rank 0 judges by its own part of the data.

    Example:
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        average = hvd.callbacks.MetricAverageCallback()  # before the callbacks that read the metrics
        best = hvd.callbacks.BestModelCheckpoint("best.keras", monitor="val_loss")
        data = hvd.shard_arrays(inputs, targets)
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        model.fit(data, validation_data=(inputs, targets), callbacks=[start, average, best])
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


# ---- Metrics over all ranks, in `model.fit` ------------------------------------------------------------


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's logs, of training and validation, by the values over the data of all ranks.

    They are exact, even if ranks have seen different numbers of samples: `sirtaki.keras.reduce_metrics`
    documents how. Logs that do not come from the model's metrics are averaged by value, weighted with the
    number of samples.

    Place it before the callbacks that read the logs (ReduceLROnPlateau, EarlyStopping, BestModelCheckpoint,
    ...): they then act alike on all ranks.

    Example:
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        average = hvd.callbacks.MetricAverageCallback()
        stop = keras.callbacks.EarlyStopping(monitor="loss", patience=3)  # acts alike on all ranks
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        model.fit(hvd.shard_arrays(inputs, targets), epochs=2, callbacks=[start, average, stop])
    """

    def __init__(self, device: str = "") -> None:
        """Creates the callback. `device` is accepted and ignored."""
        super().__init__()
        self._training_in: ref[Context] | None = None  # the world of the epoch in progress, if any
        self._looked_in: ref[Context] | None = None  # the world in which losses have been compared
        self._training: Results | None = None
        self._validation: Results | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._training_in = ref(current())
        self._training = self._validation = None

    def on_test_begin(self, logs: Any = None) -> None:
        """Prepares for a validation: the metrics still have the state of the training."""
        if _is_here(self._training_in) and self._training is None:
            self._training = combine(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        if _is_here(self._training_in):
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
    """Returns whether this world is the present world; an epoch of an earlier world has ended with it."""
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


# ---- Learning rates that follow a schedule, by epochs and by batches, in `model.fit` -------------------
# The warm-up and the correction of momentum are those of Goyal et al., "Accurate, Large Minibatch SGD:
# Training ImageNet in 1 Hour" (2017).


Multiplier = float | Callable[[float], float]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times a multiplier, from `start_epoch` to before `end_epoch`.

    Example:
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        # 0.1 in epochs 0 and 1, then 0.05, 0.025, ...
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=0.5, start_epoch=1)
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        model.fit(hvd.shard_arrays(inputs, targets), epochs=3, callbacks=[start, schedule])
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Multiplier,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Defines the learning rate.

        Args:
            initial_lr: the value to multiply.
            multiplier: a function of the epoch, or a number m: m to the power of the epochs since
                `start_epoch`.
            start_epoch: the first epoch in which the callback sets the learning rate, from 0.
            end_epoch: the first epoch in which it no longer does; None: it does to the end.
            staircase: whether it changes with epochs only; else with each batch, at fractions of epochs.
            momentum_correction: whether the accumulated momentum is scaled when the learning rate changes,
                because momentum is measured in steps of the old one.
            steps_per_epoch: batches per epoch; required if not `staircase` and Keras does not know it.

        Raises:
            ValueError: `initial_lr` is None.
        """
        super().__init__()
        if initial_lr is None:
            raise ValueError(
                "initial_lr has to be given: the learning rate that the multiplier is applied to"
            )
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._current_epoch = 0
        self.multiplier = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self._current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(self.multiplier(epoch + batch / self._steps()))
        elif batch == 0:
            self._set(self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["learning_rate"] = _rate(self.model.optimizer)

    def _steps(self) -> int:
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not steps:
            raise ValueError(
                "Keras does not know how many batches an epoch has here: give steps_per_epoch to the "
                "callback of the learning rate, or to fit()"
            )
        return steps

    def _set(self, multiplier: float) -> None:
        sync_variables(self.model)
        optimizer = self.model.optimizer
        before, now = _rate(optimizer), self.initial_lr * multiplier
        if now == before:
            return
        optimizer.learning_rate = now
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self.momentum_correction and before > 0 and isinstance(inner, keras.optimizers.SGD):
            for momentum in getattr(inner, "momentums", None) or ():
                momentum.assign(momentum * (now / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate in even steps, batch by batch, from `initial_lr` / size to `initial_lr`.

    Many ranks together process a large batch, and a learning rate that suits it is too large for the first
    epochs. In an elastic job the present number of ranks counts, and `fit(initial_epoch=state.epoch, ...)`
    continues the warm-up instead of beginning it again.

    Example:
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=2, verbose=1)
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        model.fit(hvd.shard_arrays(inputs, targets), epochs=3, callbacks=[start, warm_up])
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Defines the warm-up.

        Args:
            initial_lr: the final learning rate: the one for all ranks together.
            warmup_epochs: the number of epochs of the warm-up.
            momentum_correction, steps_per_epoch: as for `LearningRateScheduleCallback`.
            verbose: 1 to report the end of the warm-up.

        Raises:
            ValueError: `initial_lr` is None.
            NotInitializedError: init() has not been called.
        """
        current()  # raises before init(), not in the first batch

        def multiplier(epoch: float) -> float:
            size = current().size  # in an elastic job it may change
            passed = min(epoch + 1.0 / self._steps(), warmup_epochs)
            return (1.0 + passed * (size - 1) / warmup_epochs) / size

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and current().rank == 0 and epoch + 1 == self.end_epoch:
            rate = _rate(self.model.optimizer)
            print(f"epoch {epoch + 1}: the warm-up is over, the learning rate is {rate:g}")


def _rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


# ---- An equal start on every rank, in `model.fit` ------------------------------------------------------


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts a rank's model and optimizer to all ranks, before the first batch.

    `sirtaki.keras.broadcast_model` documents what is copied; the seeds of dropout are not. A model that gets
    its weights only with its first batch, on any rank, is broadcast right after that batch: the first step of
    the other ranks is then lost. Give it an Input, or call `model.build(shape)`, to avoid that.

    At the start it checks that all ranks train the same number of epochs and batches, and after each epoch
    that they have the same model.

    Example:
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        model.fit(hvd.shard_arrays(inputs, targets), callbacks=[start])
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
        self._steps = CompiledStepCounter()

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
        """Fails unless all ranks end the training, if this rank ends it in the middle of an epoch."""
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


class CompiledStepCounter:
    """Counts the compiled steps of a model's distributed optimizer; other steps count themselves."""

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


# ---- Local steps in `model.fit`: the ranks exchange their variables once in many batches ---------------


def _has_averages(optimizer: Any) -> bool:
    """Returns whether an optimizer, or its inner optimizer, keeps averages over time."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return bool(getattr(optimizer, "use_ema", False)) or (inner is not None and _has_averages(inner))


class LocalSGDCallback(keras.callbacks.Callback):
    """Lets each rank train with its own gradients, and averages the model after `every` batches.

    Give the model its plain optimizer, whose state, such as momenta, stays each rank's own. Averaged are the
    trainable variables and the statistics of normalisation, in layers that are not frozen. The last
    incomplete window of an epoch is averaged before the epoch's validation, so validation and the callbacks
    of the epoch's end see the same model on all ranks; place them after this one. Ranks may have different
    numbers of batches: one that has fewer waits at its epoch's end, and takes part in the averages of the
    others with the weight of its batches since the last one. (Local SGD, arXiv 1805.09767.)

    With an outer optimizer, the average difference since the last average is the gradient of that optimizer's
    step from there. (DiLoCo, arXiv 2311.08105.)

    All ranks have to begin with equal variables, as BroadcastGlobalVariablesCallback gives; this is checked
    before the first batch. In an elastic job, the callback is part of the state:
    `hvd.elastic.KerasState(model, local_steps=callback)`.

    Example:
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        average = hvd.callbacks.LocalSGDCallback(every=4)  # batches
        model.compile(optimizer, loss="mse")  # the plain optimizer
        model.fit(hvd.shard_arrays(inputs, targets, batch_size=1), callbacks=[start, average])
    """

    def __init__(
        self, every: int, outer: keras.optimizers.Optimizer | None = None, each_epoch: bool = True
    ) -> None:
        """Creates the callback.

        Args:
            every: batches between two averages, 1 or more.
            outer: an optimizer of Keras, such as keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True), as
                in the paper; None: the variables become their averages.
            each_epoch: whether the end of an epoch is the end of a window. If not, the model of a rank
                differs from the others' there, and only the end of the training makes it equal.

        Raises:
            ValueError: `every` is no such number, or `outer` no plain optimizer of Keras.
        """
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every is {every!r}, but it has to be a number of batches, 1 or more")
        if outer is not None and (
            not isinstance(outer, keras.optimizers.Optimizer) or distributed_of(outer) is not None
        ):
            raise ValueError(
                "outer has to be a plain optimizer of Keras, such as keras.optimizers.SGD(0.7, momentum=0.9, "
                "nesterov=True)"
            )
        self._every, self._outer, self._each_epoch = every, outer, each_epoch
        self._averager: Averager | None = None
        self._batches = 0  # since the last average
        self._last_batch = -1
        self._is_open = False  # whether an epoch is to be ended
        self.is_in_state = False  # of an elastic job

    @property
    def is_synchronized(self) -> bool:
        """Whether the model is equal on all ranks: no batch was trained since the last average."""
        return self._batches == 0

    def restart(self) -> None:
        """Begins a new window: the model has become that of a commit, which is equal on all ranks."""
        self._averager, self._batches = None, 0

    def outer_variables(self, model: Any) -> list[Any]:
        """Returns the variables of this model's outer optimizer; [] if there is none."""
        if self._outer is not None and not self._outer.built:
            self._outer.build(model.trainable_variables)
        return [] if self._outer is None else list(self._outer.variables)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        mark_averaged(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that the ranks can average.

        Raises:
            ValueError: the model's optimizer is distributed, the callback is no part of an elastic job's
                state, or, on all ranks, a model without weights.
        """
        self.restart()
        if distributed_of(self.model.optimizer) is not None:
            raise ValueError(
                "LocalSGDCallback averages variables, and the model's optimizer averages gradients as well: "
                "compile the model with the plain optimizer, without hvd.DistributedOptimizer"
            )
        if _has_averages(self.model.optimizer):
            raise ValueError(
                "the model's optimizer has use_ema=True, with which fit ends by giving each rank its own "
                "averages over time, after the last average over the ranks: leave out use_ema"
            )
        if current().survivors is not None and not self.is_in_state:
            raise ValueError(
                "in an elastic job LocalSGDCallback has to be part of the state, which knows by it when the "
                "ranks are equal: hvd.elastic.KerasState(model, local_steps=callback, …)"
            )
        gathered = allgather_object(is_built(self.model))
        if not all(gathered):
            raise ValueError(
                f"the model has no weights yet on rank {gathered.index(False)}, but all ranks have "
                "to begin with equal ones: give it an Input, or call model.build(shape)"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._last_batch, self._is_open = -1, self._each_epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begun()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = self.params.get("steps")
        if steps is not None:  # with steps_per_execution, Keras names batches that do not exist
            batch = min(batch, steps - 1)
        elif self.model.steps_per_execution > 1:
            raise ValueError(
                "LocalSGDCallback counts batches, which Keras does not tell for data of unknown length with "
                "steps_per_execution: pass steps_per_epoch to fit, or leave out steps_per_execution"
            )
        self._batches += batch - self._last_batch
        self._last_batch = batch
        if self._batches >= self._every:
            self._average()

    def on_test_begin(self, logs: Any = None) -> None:
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        while not self._average(has_ended_epoch=True, has_ended=True).all_have_ended:
            pass

    def _end_epoch(self) -> None:
        """Averages until no rank has batches left in its epoch."""
        if self._is_open:
            self._is_open = False
            while not self._average(has_ended_epoch=True).all_have_ended_epoch:
                pass

    def _average(self, has_ended_epoch: bool = False, has_ended: bool = False) -> AverageOutcome:
        averager = self._begun()
        sync_variables(self.model)
        part = AveragePart(self._batches / self._every, has_ended_epoch, has_ended)
        self._batches = 0
        return averager.average(part)

    def _begun(self) -> Averager:
        """Makes sure, before the first batch, that all ranks begin with the same variables."""
        if self._averager is None:
            sync_variables(self.model)
            check_before_local_steps(self.model, self.outer_variables(self.model))
            self._averager = Averager(self.model, self._outer, "LocalSGDCallback")
        return self._averager


# ---- The state of a model during training --------------------------------------------------------------
# The values of its variables, and how the ranks exchange them.


_averaged: WeakSet[Any] = WeakSet()


def sync_variables(model: Any) -> None:
    """Stores the current values in a model's variables, so that they can be read and changed between batches.

    On the JAX backend Keras passes the values from step to step instead, and does not update the variables.
    """
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


def is_built(model: Any) -> bool:
    """Returns whether a model and all its layers have their weights."""
    return model.built and all(layer.built for layer in layers_of(model))


def mark_averaged(model: Any) -> None:
    """Records that a callback averages the variables of a model, so its optimizer may be undistributed."""
    _averaged.add(model)


def is_averaged(model: Any) -> bool:
    """Returns whether a callback averages the variables of a model."""
    return model in _averaged
