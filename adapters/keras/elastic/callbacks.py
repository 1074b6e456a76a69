"""Callbacks that keep a state up to date in `model.fit`, and commit it.

For example, with `state = hvd.elastic.KerasState(model, epoch=0, batch=0, data=data)`:

    @hvd.elastic.run
    def train(state):
        model.fit(data, initial_epoch=state.epoch, epochs=10, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ])

All ranks use the same ones, in the same order, CommitStateCallback after the others.
"""

from __future__ import annotations

from typing import Any

import keras

from sirtaki.bindings.default_context import current
from sirtaki.common.hints import hint
from sirtaki.keras.shares import Share

_INEXACT = (
    "{count} batches of this epoch are skipped, converted from another number of ranks: some samples may be "
    "repeated or left out. Data of hvd.shard_arrays(), given as an attribute of the state, continue exactly"
)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state after every `batches_per_commit` batches, and after every epoch.

    A state with local steps is committed at the next average after so many batches.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        """Creates the callback.

        Raises:
            ValueError: less than one batch.
        """
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit is {batches_per_commit}, but it has to be 1 at least")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits, if it is due.

        Raises:
            HostsUpdatedInterrupt, HorovodInternalError: as `State.commit`.
        """
        if _is_skipped(self.model, batch):
            return
        self.batches_remaining -= 1
        if self.batches_remaining <= 0 and self._is_synchronized:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits; raises as `on_train_batch_end` does."""
        if self._is_synchronized:
            self.state.commit()

    @property
    def _is_synchronized(self) -> bool:
        return getattr(self.state, "is_synchronized", True)


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps `state.batch`, the number of batches that have been done in the epoch.

    When `fit` starts with a state in the middle of an epoch, it continues there: the batches that have been
    done are read, and nothing is computed for them. So the data have to come in the same order again. If the
    number of ranks has changed, `state.batch` is converted. Data of `hvd.shard_arrays` or `hvd.shard` (of a
    PyDataset), given as an attribute of the state, are exact in any case: what is left of the epoch is dealt
    to the present ranks.
    """

    def __init__(self, state: Any) -> None:
        """Creates the callback, for a state with an attribute `batch`."""
        super().__init__()
        self.state = state
        self._share: Share | None = None
        self._skipped = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Arranges that batches which have been done are skipped.

        Raises:
            ValueError: the state has several datasets.
        """
        state, size = self.state, current().size
        self._share = _share_of(state)
        if self._share is not None:
            self._share.count()
            state.batch = self._share.skipped
        else:
            before = getattr(state, "world_of_batch", 0) or size
            if state.batch and before != size:
                state.batch = -(-state.batch * before // size)
                if current().rank == 0:
                    hint(_INEXACT.format(count=state.batch))
        state.world_of_batch = size
        self._skipped = state.batch
        self._unwrap()
        if self._skipped:
            self.model.train_function = _Skipping(self.model, self._skipped)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if _is_skipped(self.model, batch):
            return
        self.state.batch = batch + 1
        if self._share is not None:
            self._share.record(batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._unwrap()
        self.state.batch = 0
        if self._share is not None:
            self._share.finish_epoch()

    def _unwrap(self) -> None:
        if isinstance(self.model.train_function, _Skipping):
            self.model.train_function = self.model.train_function.step


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps `state.epoch`, the number of epochs that have been done.

    A training function continues with `fit(initial_epoch=state.epoch, epochs=N)`, or, as with Horovod, with
    `fit(epochs=N - state.epoch)`, which numbers the epochs from 0 again: for schedules and warm-ups, too.
    """

    def __init__(self, state: Any) -> None:
        """Creates the callback, for a state with an attribute `epoch`."""
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch += 1


class _Skipping:
    """A model's training step that reads the first batches of an epoch and computes nothing for them."""

    def __init__(self, model: Any, batches: int) -> None:
        self.step = model.train_function
        self.batches = batches
        self._each = model.steps_per_execution
        self._calls_left = -(-batches // self._each)

    def __call__(self, *given: Any) -> Any:
        if self._calls_left == 0:
            return self.step(*given)
        self._calls_left -= 1
        if keras.backend.backend() != "torch":  # torch's step gets the batch, the others get the iterator
            for _ in range(self._each):
                next(given[-1])
        return ({}, given[0]) if keras.backend.backend() == "jax" else {}


def _is_skipped(model: Any, batch: int) -> bool:
    step = model.train_function
    return isinstance(step, _Skipping) and batch < step.batches


def _share_of(state: Any) -> Share | None:
    found = [one for one in vars(state).values() if isinstance(one, Share)]
    if len(found) > 1:
        raise ValueError(
            "the state has several datasets, but only the one that fit() trains on has a position in its "
            "epoch: leave those for validation out"
        )
    return found[0] if found else None
