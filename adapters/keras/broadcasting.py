"""Makes all ranks start equally: broadcasts a rank's variables to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from sirtaki.common.ops.objects import allgather_object
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.keras.compression import Compression, Compressor
from sirtaki.keras.operations import broadcast
from sirtaki.keras.training.optimizer import DistributedOptimizer
from sirtaki.keras.training.sharded.optimizer import ShardedVariables, equal_variables


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copies rank `root_rank`'s values of these variables to all ranks of the set. All of them must call it.

    Args:
        variables: variables of Keras, the same number, shapes and dtypes on all ranks.
        root_rank: the rank whose values are copied: a rank of the world, also within a process set.
        process_set: the ranks that take part.

    Raises:
        ValueError: on all ranks, if their variables do not match.
        PeerLostError: a rank died.

    Example:
        hvd.broadcast_variables(model.variables, root_rank=0)  # all ranks start alike
    """
    found = list(variables)
    _check_alike(found, process_set)
    for variable in found:
        variable.assign(broadcast(variable, root_rank, process_set=process_set))


def broadcast_model(
    model: Any,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    local_variables: Sequence[Any] | None = None,
) -> None:
    """Copies rank `root_rank`'s model, and any optimizer, to all ranks of the set. All must call it.

    Copied are the weights of all layers, with the statistics of normalisation, and all variables of the
    optimizer: momenta, the number of steps, the learning rate, the loss scale. Not copied are the state of
    random number generators (dropout, augmentation), which should differ between ranks, and metrics; with
    shard="state", neither is a rank's part of the optimizer's state, which no other rank has.

    Args:
        model: a built model of Keras; its optimizer is included if it has been compiled with one.
        root_rank: the rank whose values are copied: a rank of the world, also within a process set.
        process_set: the ranks that take part.
        local_variables: variables that are not changed.

    Raises:
        ValueError: on all ranks, if their models do not match, or if with shard="state" their optimizers are
            at different steps.
        PeerLostError: a rank died.

    Example:
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        hvd.broadcast_model(model, root_rank=0)  # its weights, and the optimizer's variables
    """
    kept = {id(variable) for variable in local_variables or ()}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    if isinstance(optimizer, ShardedVariables):
        _check_steps(optimizer)
    variables = [*model.weights, *(equal_variables(optimizer) if optimizer is not None else ())]
    broadcast_variables(
        [variable for variable in variables if id(variable) not in kept], root_rank, process_set
    )


def _check_steps(optimizer: ShardedVariables) -> None:
    """Raises ValueError, on all ranks, if the parts of an optimizer's state are from different steps."""
    steps = allgather_object(int(keras.ops.convert_to_numpy(optimizer.iterations)))
    for rank, count in enumerate(steps):
        if count != steps[0]:
            raise ValueError(
                f"the optimizer has taken {count} steps on rank {rank}, and {steps[0]} on rank 0: with "
                "shard= each rank has a part of its state, which no other can send. Load it on all ranks"
            )


def _check_alike(variables: Sequence[Any], process_set: ProcessSet) -> None:
    mine = [
        (tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)) for variable in variables
    ]
    ranks = process_set.ranks
    gathered = allgather_object(mine, process_set=process_set)
    for rank, theirs in zip(ranks, gathered, strict=True):
        if len(theirs) != len(gathered[0]):
            raise ValueError(
                f"rank {rank} has {len(theirs)} variables to broadcast, rank {ranks[0]} has "
                f"{len(gathered[0])}: make the same model, with the same optimizer, on all ranks"
            )
        for index, (its, first) in enumerate(zip(theirs, gathered[0], strict=True)):
            if its != first:
                raise ValueError(
                    f"variable {index} ({getattr(variables[index], 'path', variables[index].name)}) is of "
                    f"shape {its[0]} and dtype {its[1]} on rank {rank}, but {first[0]} and {first[1]} on "
                    f"rank {ranks[0]}: make the same model, with the same optimizer, on all ranks"
                )


# ---- Loads models from files, and makes their optimizers distributed again -----------------------------


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Loads a model, saved with or without sirtaki, and makes its optimizer distributed.

    All ranks must call it; or rank 0 alone saves and loads, and all other ranks receive its weights by
    `broadcast_model`.

    Args:
        filepath: as for `keras.models.load_model`.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other classes and functions that Keras does not know, by name.
        compression: as for `DistributedOptimizer`.
        legacy_opts: has to be False: there are no legacy optimizers in Keras 3.
        options: further arguments of `DistributedOptimizer`, which are not saved: `backward_passes_per_step`,
            too, or the mean of the passes is used instead of their sum.

    Returns:
        The model, with the state of the optimizer that it was saved with.

    Raises:
        ValueError: the file cannot be loaded, or wrong arguments.
        NotInitializedError: init() has not been called.

    Example:
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        hvd.save_model(model, "trained.keras")
        model = hvd.load_model("trained.keras")  # its optimizer is distributed again
    """
    if legacy_opts:
        raise ValueError("legacy_opts is True, but Keras 3 has no legacy optimizers: leave it out")
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model
