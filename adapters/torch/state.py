"""Makes all ranks start equally: broadcasts a rank's parameters and optimizer state to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sirtaki.bindings.context import current
from sirtaki.common.ops import process_sets
from sirtaki.common.ops.objects import broadcast_object
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.torch.ops.broadcasting import Placeholder, broadcast_all, described, filled
from sirtaki.torch.ops.nested import Path, tensors_of
from sirtaki.torch.training.parameters import (
    group_sizes,
    options_of,
    parameters_of,
    set_options,
    set_state,
    state_of,
)
from sirtaki.torch.training.sharded.optimizer import Sharded


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor] | Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies rank `root_rank`'s tensors to all ranks of the set, in place. All of them must call it.

    Args:
        params: `model.state_dict()` (buffers of any dtype are supported), `model.named_parameters()`, or a
            list of tensors, with the same names, shapes and dtypes on all ranks.
        root_rank: the rank whose tensors are copied: a rank of the world, also within a process set.
        process_set: the ranks that take part.

    Raises:
        ValueError: anything else, or a tensor that cannot be exchanged.
        MismatchError: ranks disagree about a shape or dtype.
        PeerLostError: a rank died.

    Example:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    named = [(f"parameter.{name}", tensor) for name, tensor in named_tensors("broadcast_parameters", params)]
    broadcast_all(current(), named, root_rank, process_set)


def named_tensors(function: str, params: Any) -> list[tuple[str, Tensor]]:
    """Returns the tensors of a state_dict(), of named parameters or of a list, with their names.

    Raises ValueError, naming the called function, for anything else.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor):
        items = list(params)
        named = [item if isinstance(item, tuple) else (str(place), item) for place, item in enumerate(items)]
    else:
        raise _not_parameters(function, "the argument", params)
    for pair in named:
        if len(pair) != 2 or not isinstance(pair[1], Tensor):
            raise _not_parameters(function, repr(pair[0]), pair[-1])
    return named


def _not_parameters(function: str, what: str, value: Any) -> ValueError:
    return ValueError(
        f"{function} takes model.state_dict(), model.named_parameters() or a list of tensors, but {what} is "
        f"of type {type(value).__name__}; other values can be sent with broadcast_object"
    )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies rank `root_rank`'s optimizer state to all ranks: momenta, counters, learning rates.

    All ranks of the set must call it, with optimizers of one class over matching parameters. Their previous
    state does not matter: it is enough if the root alone has loaded a checkpoint. No step is taken, so
    `model`, which Horovod needs for sparse parameters, is ignored.

    Raises:
        ValueError: an LBFGS optimizer (its state depends on the rank's own steps), one with shard=, or one
            whose parameter groups do not match the root's.
        PeerLostError: a rank died.

    Example:
        if hvd.is_root():
            optimizer.param_groups[0]["lr"] = 0.01  # such as a checkpoint that rank 0 has loaded
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if isinstance(optimizer, Sharded):
        raise ValueError(
            "with shard= each rank has other slices of the optimizer's state: broadcast it before "
            "DistributedOptimizer, or load the same hvd.full_state_dict() on all ranks"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of an LBFGS optimizer cannot be broadcast: it is rebuilt as it steps")
    context = current()
    mine: dict[str, Any] = {
        "state": state_of(optimizer),
        "groups": options_of(optimizer),
        "sizes": group_sizes(optimizer),
    }
    structure = broadcast_object(described(mine), root_rank, "optimizer", process_set)
    _check_groups(context.rank, root_rank, structure["sizes"], mine["sizes"])
    parameters = parameters_of(optimizer)
    gpu = next((parameter.device for parameter in parameters if parameter.is_cuda), None)
    own = tensors_of(mine)

    def tensor_for(path: Path, placeholder: Placeholder) -> Tensor:
        return own[path] if placeholder.fits(own.get(path)) else placeholder.empty(gpu)

    theirs, tensors = filled(structure, tensor_for)
    named = [(".".join(map(str, ("optimizer", *path))), tensor) for path, tensor in tensors.items()]
    broadcast_all(context, named, root_rank, process_set)
    if context.rank != root_rank:
        set_state(optimizer, theirs["state"], parameters)
        set_options(optimizer, theirs["groups"])


def _check_groups(rank: int, root: int, theirs: list[int], mine: list[int]) -> None:
    if theirs != mine:
        raise ValueError(
            f"the optimizers differ: rank {root} has parameter groups of {theirs} parameters, rank {rank} of "
            f"{mine}; make them in the same way on all ranks"
        )


# ---- The end of the data, for ranks with unequal amounts -----------------------------------------------


def join(
    device: int = -1,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Signals that this rank has no more data, and waits until all ranks of the set have done so.

    Until then the rank takes part in the others' operations with neutral elements: zeros in sums, infinities
    in minima and maxima, ones in products, no rows in what is gathered. It cannot be the root of a broadcast,
    nor send or receive. An average still divides by the number of all ranks, or, with the setting
    join_average=contributors, by those that have not joined. All ranks of the set must call it in the end.

    Steps that the others still take do not change the parameters of a rank that has joined. With `model` and
    `optimizer`, all ranks get those of the rank that joined last. Without them, the ranks have diverged
    unless all had the same number of steps, and the optimizer's next step raises ParametersDifferError.

    Args:
        device: the GPU on which this rank takes part, if the others' tensors are on GPUs; -1: the one that
            its own tensors have been on.
        model: its parameters and buffers are made equal on all ranks afterwards. On all ranks, or none.
        optimizer: its state is made equal on all ranks afterwards. On all ranks, or none.
        process_set: the set in which this rank has no more data.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        ValueError: this rank does not belong to the set, or has joined it already.
        PeerLostError: a rank died.

    Example:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for inputs, targets in loader[hvd.rank() :]:  # rank 1 has fewer batches than rank 0
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
        hvd.join(model=model, optimizer=optimizer)
    """
    last = process_sets.join(device, process_set=process_set)
    if model is not None:
        broadcast_parameters([*model.named_parameters(), *model.named_buffers()], last, process_set)
    if optimizer is not None:
        broadcast_optimizer_state(optimizer, last, process_set=process_set)
    return last
