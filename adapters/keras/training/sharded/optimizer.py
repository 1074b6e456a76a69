"""The abilities of an optimizer that updates only the variables of this rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from sirtaki.bindings.context import current
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.basics import on_root
from sirtaki.common.ops.objects import broadcast_object
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.training.combinations import refuse_combinations
from sirtaki.common.training.groups import Place, owners_of, place_in
from sirtaki.keras._private import (
    drop_slots,
    keep_slots,
    replaced,
    set_trainable_variables,
    slots_of,
    trainable_variables_of,
)
from sirtaki.keras.training.gradient_reducer import GradientReduction, is_stored


@dataclass
class Division:
    """The division of an optimizer's variables among the ranks.

    Attributes:
        place: this rank's among the ranks for which the variables have been divided.
        owners: the rank that updates each variable, by Keras' key of the variable.
        gradients: while the optimizer steps, the gradients that it clips together on all ranks, and whether
            their variables belong to this rank.
        whole_state: while a file is written, the state of all variables, as Keras saves it.
    """

    place: Place
    owners: dict[Any, int] = field(default_factory=dict)
    gradients: list[tuple[Any, bool]] = field(default_factory=list)
    whole_state: dict[str, Any] | None = None


class ShardedVariables(keras.optimizers.Optimizer):
    """An optimizer with variables that belong to a single rank each.

    The owner of a variable keeps its state, updates it with the gradient that is equal on all ranks, and
    broadcasts it. So its update is bitwise equal to the original optimizer's, whatever it computes.
    """

    _exchange: GradientReduction
    _division: Division
    _plain: type[Any]

    def build(self, variables: Sequence[Any]) -> None:
        """Works like the optimizer's own, with state for the variables of this rank only."""
        if self.built:
            return
        self._assign_owners(variables)
        super().build([variable for variable in variables if self.is_own(variable)])
        set_trainable_variables(self, variables)
        self._check_slots()

    def begin_division(self) -> None:
        """Divides the state that the optimizer has, or will have once it is built."""
        # Keras and TensorFlow inspect every attribute that is set on an optimizer; this one must stay hidden.
        object.__setattr__(self, "_division", Division(place_in(current())))
        if self.built:
            self._check_slots()
            self._assign_owners(trainable_variables_of(self))
            keep_slots(self, self.own_places())

    @property
    def place(self) -> Place:
        """Returns this rank's place among the ranks for which the variables have been divided."""
        return self._division.place

    def divide_for(self, place: Place) -> None:
        """Divides the variables among other ranks. The state of this rank's variables is new then."""
        if place == self.place:
            return
        self._division.place = place
        if self.built:
            drop_slots(self)
            with keras.name_scope(self.name):
                self.build(list(trainable_variables_of(self)))

    def _check_place(self) -> None:
        """Raises UnsupportedError if the variables were divided among ranks of another world."""
        place = place_in(current())
        if place != self.place:
            raise UnsupportedError(
                f"this optimizer with shard= has the state of rank {self.place.position} of "
                f"{self.place.ranks}, and this is rank {place.position} of {place.ranks}: make it part of "
                "the elastic state, hvd.elastic.KerasState(model, optimizer)"
            )
        self._exchange.backend.require_place(place)

    def _check_slots(self) -> None:
        """Raises UnsupportedError if part of the state cannot be told from what all ranks have."""
        for slot in beside_slots(self):
            if len(slot.shape):
                raise UnsupportedError(
                    f"shard= cannot divide {slot.path}, because Keras {keras.__version__} does not tell "
                    "which variable of the model it belongs to: leave out shard, or install a newer Keras"
                )

    def _assign_owners(self, variables: Sequence[Any]) -> None:
        sizes = [math.prod(variable.shape) * np.dtype(variable.dtype).itemsize for variable in variables]
        owners = owners_of(sizes, self.place.ranks)
        self._division.owners.update(zip(map(self._var_key, variables), owners, strict=True))

    def owner_of(self, variable: Any) -> int:
        """Returns the rank that updates a variable. Raises ValueError for a variable unknown to `build`."""
        owner = self._division.owners.get(self._var_key(variable))
        if owner is None:
            raise ValueError(
                f"the optimizer was built for other variables than {variable.path}: make a new one for them"
            )
        return owner

    def is_own(self, variable: Any) -> bool:
        """Returns whether this rank updates a variable."""
        return self.owner_of(variable) == self.place.position

    def own_places(self) -> list[int]:
        """Returns the indices of this rank's variables among the optimizer's variables."""
        return [place for place, variable in enumerate(trainable_variables_of(self)) if self.is_own(variable)]

    # ---- A step ----------------------------------------------------------------------------------------

    def apply(self, grads: Sequence[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Works like the optimizer's own, with gradients that are equal on all ranks. All must call it.

        Raises:
            ValueError: variables that the optimizer was not built for, or that are local to a rank, or no
                gradient for any of them.
            UnsupportedError: the ranks have changed, and the optimizer is not part of the elastic state.
        """
        self._check_place()
        refuse_local_variables(bool(self._exchange.local.numbers()))
        known = trainable_variables_of(self)
        variables = list(known if trainable_variables is None else trainable_variables)
        gradients = list(grads)
        if len(gradients) != len(variables):
            raise ValueError(f"there are {len(gradients)} gradients for {len(variables)} variables")
        if all(gradient is None for gradient in gradients):
            raise ValueError("no rank has computed a gradient for any variable")
        if trainable_variables is not None:
            self.build(variables)
        own = [index for index, variable in enumerate(variables) if self.is_own(variable)]
        if any(gradients[index] is not None for index in own):
            with self._clipping(gradients, variables):
                super().apply([gradients[index] for index in own], [variables[index] for index in own])
        else:
            self.iterations.assign_add(1)
        for rank in sorted({self.owner_of(variable) for variable in variables}):
            updated = [variable for variable in variables if self.owner_of(variable) == rank]
            self._exchange.backend.broadcast(f"{self._exchange.prefix}.updated by {rank}", updated, rank)

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """Works like `apply`, for backends that pass variables as arguments."""
        known = trainable_variables_of(self)
        mapping = [
            *zip(known, trainable_variables, strict=True),
            *zip(self.variables, optimizer_variables, strict=True),
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.apply(grads, known)
        return tuple(
            [scope.get_current_value(variable) for variable in given] for given in (known, self.variables)
        )

    def _clipping(self, gradients: Sequence[Any], variables: Sequence[Any]) -> AbstractContextManager[None]:
        """Lets `_clip_gradients`, inside, clip by the norm of all gradients, as the plain optimizer would."""
        if not self.global_clipnorm:
            return nullcontext()
        scale = self.loss_scale_factor
        clipped = [
            (gradient if scale is None else gradient / scale, self.is_own(variable))
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None and not is_stored(variable)
        ]
        return replaced(self._division, gradients=clipped)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        if not self.global_clipnorm:
            return super()._clip_gradients(grads)
        clipped = super()._clip_gradients([gradient for gradient, _ in self._division.gradients])
        return [
            gradient
            for gradient, (_, is_own) in zip(clipped, self._division.gradients, strict=True)
            if is_own
        ]

    # ---- The state -------------------------------------------------------------------------------------

    def make_plain(self) -> Any:
        """Returns a plain optimizer of the same configuration, with a new state for all variables."""
        plain = self._plain.from_config(self.get_config())
        plain.build(list(trainable_variables_of(self)))
        return plain

    def saving(self, whole_state: dict[str, Any]) -> AbstractContextManager[None]:
        """Lets Keras, inside, save this state as that of the optimizer."""
        return replaced(self._division, whole_state=whole_state)

    def save_own_variables(self, store: Any) -> None:
        """Works like the optimizer's own inside `saving`.

        Raises:
            UnsupportedError: anywhere else, because a rank alone has only a part of the state.
        """
        if self._division.whole_state is None:
            raise UnsupportedError(
                "with shard= this rank has only a part of the optimizer's state, which would look like all "
                "of it: call hvd.save_model(model, path) on all ranks"
            )
        for key, value in self._division.whole_state.items():
            store[key] = value

    def load_own_variables(self, store: Any) -> None:
        """Works like the optimizer's own, with the state of all variables: each rank keeps its part.

        Raises:
            ValueError: the state does not belong to such an optimizer.
        """
        plain = self.make_plain()
        if len(store.keys()) != len(plain.variables):
            raise ValueError(
                f"a state of {len(store.keys())} variables does not fit an optimizer of "
                f"{len(plain.variables)}: load what hvd.full_state_dict(optimizer) has returned for it"
            )
        plain.load_own_variables(store)
        places, whole = self.own_places(), slots_of(plain)
        for name, values in slots_of(self).items():
            for item, place in zip(values, places, strict=True):
                if item is not None:
                    item.assign(whole[name][place])
        for slot, value in zip(beside_slots(self), beside_slots(plain), strict=True):
            slot.assign(value)


def beside_slots(optimizer: Any) -> list[Any]:
    """Returns an optimizer's variables that belong to no variable of the model, such as its learning rate."""
    kept = {id(value) for values in slots_of(optimizer).values() for value in values}
    return [variable for variable in optimizer.variables if id(variable) not in kept]


def equal_variables(optimizer: Any) -> list[Any]:
    """Returns an optimizer's variables that are equal on all ranks: not divided among the ranks."""
    return beside_slots(optimizer) if isinstance(optimizer, ShardedVariables) else list(optimizer.variables)


# ---- The whole state of a divided optimizer ------------------------------------------------------------


def full_state_dict(optimizer: Any, root_rank: int | None = None) -> dict[str, Any]:
    """Returns an optimizer's whole state, in the original optimizer's format. All ranks must call it.

    `optimizer.load_own_variables(state)` loads it into the original optimizer, and into an optimizer with
    shard="state" on any number of ranks, each of which must load it. In callbacks of `fit`, access
    `self.model` before, as Keras then stores the values of the last step.

    Args:
        optimizer: a built optimizer, divided or not.
        root_rank: the only rank that gets the state, so that the others need no memory for it; they get an
            empty dictionary. None: all ranks get it.

    Returns:
        Arrays by the numbers of the plain optimizer's variables, as text.

    Raises:
        PeerLostError: a rank died.

    Example:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(), shard="state")
        optimizer.build(model.trainable_variables)
        state = hvd.full_state_dict(optimizer, root_rank=0)
        if hvd.is_root():
            np.savez("optimizer.npz", **state)
    """
    is_kept = root_rank in (None, current().rank)
    state: dict[str, Any] = {}
    if isinstance(optimizer, ShardedVariables):
        whole = optimizer.make_plain() if is_kept else None
        _collect(optimizer, whole)
    else:
        whole = optimizer if is_kept else None
    if whole is not None:
        whole.save_own_variables(state)
    return state


def save_model(model: Any, filepath: Any, **options: Any) -> None:
    """Saves a model with the whole state of its optimizer. All ranks must call it; rank 0 writes the file.

    It is the file of the plain model: `keras.models.load_model` reads it, and so does
    `hvd.load_model(filepath, shard="state")` on any number of ranks.

    Args:
        model: a model of Keras, the same on all ranks.
        filepath, options: as for `model.save`.

    Raises:
        Exception: on rank 0, the error of `model.save`.
        HorovodInternalError: on the others, if rank 0 could not save.

    Example:
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), shard="state"), loss="mse")
        hvd.broadcast_model(model)
        # ... the training
        hvd.save_model(model, "sharded.keras")  # rank 0 writes the state of all ranks
    """
    with saving_whole(model):
        on_root(model.save, filepath, **options)


def saving_whole(model: Any) -> AbstractContextManager[None]:
    """Lets rank 0, inside, save a model with the whole state of its optimizer. All ranks must call it."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, ShardedVariables):
        return nullcontext()
    return optimizer.saving(full_state_dict(optimizer, root_rank=0))


def _collect(optimizer: ShardedVariables, whole: Any) -> None:
    """Copies the state of all ranks into `whole`; a rank without it (None) only sends its part."""
    slots = {} if whole is None else slots_of(whole)
    own = optimizer.own_places()
    for place, variable in enumerate(trainable_variables_of(optimizer)):
        part = _part(optimizer, own.index(place)) if place in own else None
        for name, value in broadcast_object(part, optimizer.owner_of(variable)).items():
            if whole is not None:
                slots[name][place].assign(value)
    if whole is not None:
        for slot, value in zip(beside_slots(whole), beside_slots(optimizer), strict=True):
            slot.assign(value)


def _part(optimizer: ShardedVariables, place: int) -> dict[str, Any]:
    """Returns the state of a variable of this rank, as arrays."""
    values = {name: slot[place] for name, slot in slots_of(optimizer).items()}
    return {name: keras.ops.convert_to_numpy(value) for name, value in values.items() if value is not None}


# ---- The optimizers with state that can be divided by variables, and the arguments incompatible with that


# Each variable is updated from its own gradient and state alone, which is the same on all ranks at first.
_BY_VARIABLE: tuple[str, ...] = ("SGD", "Adam", "AdamW", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Ftrl")
_BY_VARIABLE += ("Lion", "Lamb", "Muon", "Adafactor")


def check_shard(shard: str | None, optimizer: Any, passes: int, process_set: ProcessSet) -> None:
    """Raises ValueError unless this is a way to divide the state of this optimizer, in this job."""
    if shard is None:
        return
    if shard != "state":
        raise ValueError(
            f'shard is {shard!r}, but it has to be "state" or None: Keras passes whole gradients to its '
            "optimizers"
        )
    kind = type(optimizer)
    if kind.__name__ not in _BY_VARIABLE or not kind.__module__.startswith("keras."):
        raise ValueError(
            "shard= needs an optimizer that is known to treat each variable by itself: "
            f"{', '.join(_BY_VARIABLE)} of keras.optimizers, and not {kind.__name__}"
        )
    if optimizer.use_ema:
        raise ValueError("use_ema needs the averages of all variables on each rank: leave out shard")
    refuse_combinations(
        {
            "keras_shard": "shard=",
            "passes": passes > 1 or bool(optimizer.gradient_accumulation_steps),
            "process_set": process_set is not global_process_set,
        }
    )


def refuse_local_variables(has_any: bool) -> None:
    """Raises ValueError if the gradients of some variables stay on each rank."""
    if has_any:
        raise ValueError(
            "variables whose gradients stay on a rank have other values on each, and shard= copies each "
            "variable from one rank to all: leave out register_local_var and local_layers, or shard"
        )


def refuse_loss_scaling() -> None:
    """Raises ValueError: an optimizer around a divided optimizer would save its part as the whole state."""
    raise ValueError(
        "LossScaleOptimizer does not go with shard=: train with mixed_bfloat16, or give the optimizer a "
        "loss_scale_factor and call model.compile(auto_scale_loss=False)"
    )
