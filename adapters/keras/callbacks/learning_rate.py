"""Learning rates that follow a schedule, by epochs and by batches, in `model.fit`.

The warm-up and the correction of momentum are those of Goyal et al., "Accurate, Large Minibatch SGD: Training
ImageNet in 1 Hour" (2017).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from sirtaki.bindings.default_context import current
from sirtaki.keras.callbacks.state import sync_variables

Multiplier = float | Callable[[float], float]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times a multiplier, from one epoch to another."""

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
