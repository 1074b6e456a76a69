"""Elastic training with Keras: the states, and callbacks that keep them up to date in `model.fit`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from sirtaki.bindings.context import current
from sirtaki.common.elastic.state import ObjectState, State, fence, run
from sirtaki.common.semantics import hint
from sirtaki.common.training.groups import Place
from sirtaki.keras import backends
from sirtaki.keras._private import accumulators_of, discard_jax_state, slots_of
from sirtaki.keras.callbacks import LocalSGDCallback, is_built, sync_variables
from sirtaki.keras.data.sharding import DatasetShare
from sirtaki.keras.training.gradient_reducer import stable_name
from sirtaki.keras.training.optimizer import distributed_of
from sirtaki.keras.training.sharded.optimizer import ShardedVariables, equal_variables
from sirtaki.numpy.elastic import ArraysState
from sirtaki.numpy.elastic.arrays_state import Entry, EntryKind

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "fence",
    "run",
]


# ---- Callbacks that keep a state up to date in `model.fit`, and commit it ------------------------------
# For example, with `state = hvd.elastic.KerasState(model, epoch=0, batch=0, data=data)`:
#
#     @hvd.elastic.run
#     def train(state):
#         model.fit(data, initial_epoch=state.epoch, epochs=10, callbacks=[
#             hvd.elastic.UpdateEpochStateCallback(state),
#             hvd.elastic.UpdateBatchStateCallback(state),
#             hvd.elastic.CommitStateCallback(state),
#         ])
#
# All ranks use the same ones, in the same order, CommitStateCallback after the others.


_INEXACT = (
    "{count} batches of this epoch are skipped, converted from another number of ranks: some samples may be "
    "repeated or left out. Data of hvd.shard_arrays(), given as an attribute of the state, continue exactly"
)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state after every `batches_per_commit` batches, and after every epoch.

    A state with local steps is committed at the next average after so many batches.

    Example:
        @hvd.elastic.run
        def train(state):  # a KerasState(model, data=hvd.shard_arrays(...), epoch=0, batch=0)
            epoch = hvd.elastic.UpdateEpochStateCallback(state)
            batch = hvd.elastic.UpdateBatchStateCallback(state)
            commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=10)  # after the others
            state.model.fit(state.data, initial_epoch=state.epoch, epochs=3, callbacks=[epoch, batch, commit])
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

    Example:
        @hvd.elastic.run
        def train(state):  # a KerasState(model, data=hvd.shard_arrays(...), batch=0)
            batch = hvd.elastic.UpdateBatchStateCallback(state)
            commit = hvd.elastic.CommitStateCallback(state)
            state.model.fit(state.data, callbacks=[batch, commit])
    """

    def __init__(self, state: Any) -> None:
        """Creates the callback, for a state with an attribute `batch`."""
        super().__init__()
        self.state = state
        self._share: DatasetShare | None = None
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

    Example:
        @hvd.elastic.run
        def train(state):  # a KerasState(model, data=hvd.shard_arrays(...), epoch=0)
            epoch = hvd.elastic.UpdateEpochStateCallback(state)
            commit = hvd.elastic.CommitStateCallback(state)
            state.model.fit(state.data, initial_epoch=state.epoch, epochs=3, callbacks=[epoch, commit])
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


def _share_of(state: Any) -> DatasetShare | None:
    found = [value for value in vars(state).values() if isinstance(value, DatasetShare)]
    if len(found) > 1:
        raise ValueError(
            "the state has several datasets, but only the one that fit() trains on has a position in its "
            "epoch: leave those for validation out"
        )
    return found[0] if found else None


# ---- The state of an elastic training with Keras: a model, its optimizer, and attributes ---------------


_UNBUILT = (
    "the model has layers without weights, which could be neither saved nor sent to other ranks: give it a "
    "keras.Input, or call model.build(shape) or the model with a batch, before the state is made"
)


class KerasState(ArraysState):
    """The state of a model, its optimizer, and attributes. A commit copies it, on every backend.

    Equal on all ranks, and checked after each change of the ranks: trainable weights and the variables of the
    optimizer, with its number of steps and its learning rate. Sent to ranks that need a state, and otherwise
    each rank's own: weights that are not trainable, such as moving statistics. Saved and restored, but never
    sent: the states of random number generators, of metrics, of gradient accumulation, and variables that are
    local to a rank.

    With shard="state" the optimizer's state is divided anew when the ranks change. A commit sends this rank's
    part to another rank, on another host if there is one; if both are lost together, the job ends, and names
    them. Then a `tf.function` with a step has to be made in the training function.

    A dataset of `shard_arrays` or `shard` that is given as an attribute continues with the samples that no
    rank has been trained on, in an epoch that the ranks change in.

    Example:
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        data = hvd.shard_arrays(inputs, targets, batch_size=4)
        state = hvd.elastic.KerasState(model, data=data, epoch=0, batch=0)
        # then train(state), which hvd.elastic.run decorates and which calls state.model.fit(state.data, ...)
    """

    _whole_state = "hvd.full_state_dict(optimizer)"

    def __init__(
        self, model: Any, optimizer: Any = None, local_steps: LocalSGDCallback | None = None, **kwargs: Any
    ) -> None:
        """Creates the state, and saves it.

        Args:
            model: a built model of Keras. Compile it before, so that its optimizer is part of the state.
            optimizer: an optimizer in place of the one that the model is compiled with. One that has no
                variables yet is built for the model's trainable weights.
            local_steps: the callback that averages the model. The model can be committed after each average.
                The optimizer's variables are each rank's own then, and a rank that joins begins with rank
                0's; those of the outer optimizer are equal on all ranks.
            kwargs: attributes, such as `epoch=0, batch=0`.

        Raises:
            ValueError: the model is not built.
        """
        if not is_built(model):
            raise ValueError(_UNBUILT)
        self.model = model
        self._given_optimizer = optimizer
        self._local_steps = local_steps
        if local_steps is not None:
            local_steps.is_in_state = True
        self._backend = backends.find()
        self.world_of_batch = 0  # the number of ranks in whose batches `batch` counts; 0: not known
        super().__init__(**kwargs)

    @property
    def optimizer(self) -> Any:
        """Returns the optimizer; None if the model has not been compiled."""
        return self._given_optimizer or getattr(self.model, "optimizer", None)

    @property
    def is_synchronized(self) -> bool:
        """Whether the model is equal on all ranks, so that it can be committed."""
        return self._local_steps is None or self._local_steps.is_synchronized

    def _require_commit(self) -> None:
        if not self.is_synchronized:
            raise ValueError(
                "a commit needs a model that is equal on all ranks, but this rank has trained batches since "
                "the last average: commit when state.is_synchronized is true, as CommitStateCallback does"
            )

    def restore(self) -> None:
        """Sets model, optimizer and attributes to their values at the last commit."""
        discard_jax_state(self.model)
        if self._is_divided:
            self._cut_for(self._saved_place)
        super().restore()

    @property
    def _is_divided(self) -> bool:
        return isinstance(self.optimizer, ShardedVariables)

    def _cut_for(self, place: Place) -> None:
        if place != self.optimizer.place:
            self.optimizer.divide_for(place)
            discard_jax_state(self.model)
            self.model.train_function = None  # Keras compiles another one, for the new variables

    def _entries(self) -> list[Entry]:
        shared: list[tuple[EntryKind, Any]] = []
        own: list[tuple[EntryKind, Any]] = []
        for kind, variable in _classified(self.model, self._built_optimizer(), self._local_steps):
            (own if kind is EntryKind.OWN else shared).append((kind, variable))
        return [
            *(_entry(f"{at}: {stable_name(item)}", kind, item) for at, (kind, item) in enumerate(shared)),
            *(_entry(f"own {at}: {stable_name(item)}", kind, item) for at, (kind, item) in enumerate(own)),
            *(_entry(name, EntryKind.DIVIDED, item) for name, item in self._slots().items()),
        ]

    def _slots(self) -> dict[str, Any]:
        """Returns this rank's part of a divided optimizer's state, by names that are equal on all ranks."""
        optimizer = self._built_optimizer()
        if not isinstance(optimizer, ShardedVariables):
            return {}
        return {
            f"{name} of {index}": item
            for name, values in slots_of(optimizer).items()
            for index, item in zip(optimizer.own_places(), values, strict=True)
            if item is not None
        }

    def _built_optimizer(self) -> Any:
        optimizer = self.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        return optimizer

    def _read(self, entries: Sequence[Entry]) -> list[Any]:
        sync_variables(self.model)
        return [self._backend.array(entry.target.value).astype(entry.dtype, copy=False) for entry in entries]

    def _write(self, entries: Sequence[Entry], arrays: Iterable[Any], details: Any) -> None:
        discard_jax_state(self.model)
        if self._local_steps is not None:
            self._local_steps.restart()
        slots = self._slots()  # an entry may be older than a division
        for entry, array in zip(entries, arrays, strict=True):
            target = slots[entry.name] if entry.kind is EntryKind.DIVIDED else entry.target
            target.assign(array)

    def _clear_own(self) -> None:
        for variable in accumulators_of(self._built_optimizer()):
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def _values(self) -> dict[str, Any]:
        return super()._values() | {"world_of_batch": self.world_of_batch}


class TensorFlowKerasState(KerasState):
    """`KerasState`, with Horovod's arguments.

    Example:
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        state = hvd.elastic.TensorFlowKerasState(model, epoch=0, batch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        """Creates the state. `backend` is accepted and ignored; other arguments are as for `KerasState`."""
        super().__init__(model, optimizer, **kwargs)


def _classified(
    model: Any, optimizer: Any, local_steps: LocalSGDCallback | None
) -> Iterator[tuple[EntryKind, Any]]:
    """Yields each variable once, with its kind."""
    distributed = distributed_of(optimizer)
    local = distributed._exchange.local.numbers() if distributed is not None else set()
    seen: set[int] = set()
    for kind, variables in (
        (EntryKind.EQUAL, model.trainable_variables),
        (EntryKind.SENT, model.non_trainable_weights),
        (EntryKind.OWN, [*model.variables, *model.metrics_variables]),
    ):
        for variable in variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                yield EntryKind.OWN if id(variable) in local else kind, variable
    for variable in local_steps.outer_variables(model) if local_steps is not None else ():
        seen.add(id(variable))
        yield EntryKind.EQUAL, variable
    if optimizer is None:
        return
    collected = {id(accumulator) for accumulator in accumulators_of(optimizer)}
    for variable in equal_variables(optimizer):
        if id(variable) not in seen:
            seen.add(id(variable))
            kind = EntryKind.SENT if local_steps is not None else _kind_of_slot(variable, model, local)
            yield EntryKind.OWN if id(variable) in collected else kind, variable


def _kind_of_slot(variable: Any, model: Any, local: set[int]) -> EntryKind:
    """Returns the kind of an optimizer's variable; a variable of a local weight is local, too.

    Keras names the variable that belongs to a weight after the weight's path.
    """
    if not local or not variable.shape:
        return EntryKind.EQUAL
    owners = {variable.path.replace("/", "_"): variable for variable in model.trainable_variables}
    names = [name for name in owners if variable.name.startswith(f"{name}_")]
    if not names:
        return EntryKind.SENT  # that of a local weight cannot be told from the others
    return EntryKind.OWN if id(owners[max(names, key=len)]) in local else EntryKind.EQUAL


def _entry(name: str, kind: EntryKind, variable: Any) -> Entry:
    return Entry(name, tuple(variable.shape), np.dtype(variable.dtype), kind, variable)
