"""The state of an elastic training with Keras: a model, its optimizer, and attributes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sirtaki.keras import backends
from sirtaki.keras._private import accumulators_of, discard_jax_state, layers_of
from sirtaki.keras.callbacks.local_steps import LocalSGDCallback
from sirtaki.keras.callbacks.state import sync_variables
from sirtaki.keras.distributed_optimizer import Distributed
from sirtaki.keras.gradient_reducer import stable_path
from sirtaki.numpy.elastic import ArraysState
from sirtaki.numpy.elastic.entries import Entry, Kind

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

    A dataset of `shard_arrays` or `shard` that is given as an attribute continues with the samples that no
    rank has been trained on, in an epoch that the ranks change in.
    """

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
        if not (model.built and all(layer.built for layer in layers_of(model))):
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
        super().restore()

    def _entries(self) -> list[Entry]:
        shared: list[tuple[Kind, Any]] = []
        own: list[tuple[Kind, Any]] = []
        for kind, variable in _classified(self.model, self._built_optimizer(), self._local_steps):
            (own if kind is Kind.OWN else shared).append((kind, variable))
        return [
            *(_entry(f"{place}: {_name(one)}", kind, one) for place, (kind, one) in enumerate(shared)),
            *(_entry(f"own {place}: {_name(one)}", kind, one) for place, (kind, one) in enumerate(own)),
        ]

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
        for entry, array in zip(entries, arrays, strict=True):
            entry.target.assign(array)

    def _clear_own(self) -> None:
        for variable in _accumulators(self._built_optimizer()):
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def _values(self) -> dict[str, Any]:
        return super()._values() | {"world_of_batch": self.world_of_batch}


class TensorFlowKerasState(KerasState):
    """`KerasState`, with Horovod's arguments."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        """Creates the state. `backend` is accepted and ignored; the others are those of `KerasState`."""
        super().__init__(model, optimizer, **kwargs)


def _classified(
    model: Any, optimizer: Any, local_steps: LocalSGDCallback | None
) -> Iterator[tuple[Kind, Any]]:
    """Yields each variable once, with its kind."""
    local = _local_numbers(optimizer)
    seen: set[int] = set()
    for kind, variables in (
        (Kind.EQUAL, model.trainable_variables),
        (Kind.SENT, model.non_trainable_weights),
        (Kind.OWN, [*model.variables, *model.metrics_variables]),
    ):
        for variable in variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                yield Kind.OWN if id(variable) in local else kind, variable
    for variable in local_steps.outer_variables(model) if local_steps is not None else ():
        seen.add(id(variable))
        yield Kind.EQUAL, variable
    if optimizer is None:
        return
    collected = {id(accumulator) for accumulator in _accumulators(optimizer)}
    for variable in optimizer.variables:
        if id(variable) not in seen:
            seen.add(id(variable))
            kind = Kind.SENT if local_steps is not None else _kind_of_slot(variable, model, local)
            yield Kind.OWN if id(variable) in collected else kind, variable


def _local_numbers(optimizer: Any) -> set[int]:
    """Returns the `id()` of each variable whose gradients stay on the rank."""
    for one in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if isinstance(one, Distributed):
            return one._exchange.local.numbers()
    return set()


def _accumulators(optimizer: Any) -> list[Any]:
    both = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return [variable for one in both if one is not None for variable in accumulators_of(one)]


def _kind_of_slot(variable: Any, model: Any, local: set[int]) -> Kind:
    """Returns the kind of an optimizer's variable; one of a local weight is local, too.

    Keras names the variable that belongs to a weight after the weight's path.
    """
    if not local or not variable.shape:
        return Kind.EQUAL
    owners = {variable.path.replace("/", "_"): variable for variable in model.trainable_variables}
    names = [name for name in owners if variable.name.startswith(f"{name}_")]
    if not names:
        return Kind.SENT  # that of a local weight cannot be told from the others
    return Kind.OWN if id(owners[max(names, key=len)]) in local else Kind.EQUAL


def _entry(name: str, kind: Kind, variable: Any) -> Entry:
    return Entry(name, tuple(variable.shape), np.dtype(variable.dtype), kind, variable)


def _name(variable: Any) -> str:
    # An optimizer's variables have the running numbers of layers in the middle of their names.
    return re.sub(r"_\d+(?=_)", "", stable_path(variable))
