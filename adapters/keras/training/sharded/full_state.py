"""The whole state of an optimizer, made of the parts of all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from sirtaki.bindings.context import current
from sirtaki.common.basics import on_root
from sirtaki.common.ops.objects import broadcast_object
from sirtaki.keras._private import slots_of, trainable_variables_of
from sirtaki.keras.training.sharded.optimizer import ShardedVariables, beside_slots


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
