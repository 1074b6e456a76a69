"""Local steps in `model.fit`: the ranks exchange their variables once in many batches."""

from __future__ import annotations

from typing import Any

import keras

from sirtaki.bindings.default_context import current
from sirtaki.common.objects import allgather_object
from sirtaki.keras.callbacks.state import is_built, mark_averaged, sync_variables
from sirtaki.keras.consistency import check_before_local_steps
from sirtaki.keras.distributed_optimizer import distributed_of
from sirtaki.keras.periodic import Averager, Outcome, Part


def _has_averages(optimizer: Any) -> bool:
    """Returns whether an optimizer, or the one inside it, keeps averages over time."""
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
        """Returns the variables of the outer optimizer of this model; [] without one."""
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

    def _average(self, has_ended_epoch: bool = False, has_ended: bool = False) -> Outcome:
        averager = self._begun()
        sync_variables(self.model)
        part = Part(self._batches / self._every, has_ended_epoch, has_ended)
        self._batches = 0
        return averager.average(part)

    def _begun(self) -> Averager:
        """Makes sure, before the first batch, that all ranks begin with the same variables."""
        if self._averager is None:
            sync_variables(self.model)
            check_before_local_steps(self.model, self.outer_variables(self.model))
            self._averager = Averager(self.model, self._outer, "LocalSGDCallback")
        return self._averager
