"""Steps written for a single device, with a common batch for all ranks: `consistent` and `mirrored`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sirtaki.common.ops.requests import Sum
from sirtaki.common.training import one_batch
from sirtaki.common.training.one_batch import Leaves, Path
from sirtaki.common.training.shares import Share, current_share
from sirtaki.torch import _private
from sirtaki.torch.consistency import checksum_of
from sirtaki.torch.ops.collectives import grouped_allgather, grouped_allreduce
from sirtaki.torch.training.reducer import GradientReducer
from sirtaki.torch.training.wrapping import Wrapped

text: Callable[[Path], str] = _private.keystr


def consistent(
    function: Callable[..., Any] | None = None,
    /,
    *,
    batch: str | Sequence[str] = (),
    out: Any = None,
    check: bool = True,
) -> Any:
    """Decorates a step written for a single device: the whole batch in, the result for the whole batch out.

    All ranks call the step, with the same arguments. The tensors of the batch are split along their first
    axis, the function runs with this rank's rows, and what it returns is combined over the ranks. Gradients
    that a `DistributedOptimizer` averages are weighted by rows. So the same loop gives the same numbers on
    one rank and on several, if the loss is a mean over rows (or a sum, with op=Sum).

    A rank may get one row less than others, or none: it then runs with tensors of 0 rows, whose results and
    gradients do not count. Collectives that the function calls itself are not weighted.

    Args:
        batch: the name of the argument that holds the batch, or several names; each a tensor, or nested
            dictionaries, lists and tuples of tensors that have equally many rows.
        out: how the ranks' results become one: "mean" (weighted by rows), "sum", "rows" (one after the other)
            or "same" (equal on all ranks, which is checked); for all of them, or in the structure of the
            result. Without it, floating scalars are means, truth values and texts the same; other results are
            refused.
        check: whether the arguments are compared over the ranks, which reads all tensors among them once.

    Returns:
        The function, or a decorator without one. Its results are the same on all ranks, without gradients.

    Raises:
        ValueError: no such argument; in a call, on all ranks: arguments that differ between them or cannot be
            split, results that cannot be combined, or an optimizer that is not distributed.
        UnsupportedError: the derivative of an operation between ranks, while their rows differ in number.

    Example:
        @hvd.consistent(batch=["inputs", "targets"])
        def evaluate(inputs, targets):  # gets this rank's rows
            return loss_of(model, inputs, targets)

        loss = evaluate(inputs, targets)  # the mean over all rows, the same on all ranks
    """
    library: Any = sys.modules[__name__]
    return one_batch.decorator(
        lambda step: one_batch.consistent(library, step, batch, out, check), function, "consistent"
    )


def mirrored(
    function: Callable[..., Any] | None = None,
    /,
    *,
    batch: str | Sequence[str] = (),
    check: bool = True,
) -> Any:
    """Decorates a function of a batch: takes a list with a batch per rank, returns the list of results.

    All ranks call it, with the same lists of `size()` elements; each computes its element, and gets the
    results of all, in the order of the list.

    Args:
        batch: the name of the argument that is such a list, or several names.
        check: whether the arguments are compared over the ranks, which reads all tensors among them once.

    Returns:
        The function, or a decorator without one. The results of other ranks are pickled on their way, and
        all are without gradients.

    Raises:
        ValueError: no such argument; in a call, on all ranks: arguments that differ between them, or no list
            with an element for each rank.

    Example:
        @hvd.mirrored(batch="batch")
        def evaluate(batch):  # gets this rank's batch
            inputs, targets = batch
            return loss_of(model, inputs, targets).item()

        losses = evaluate(list(loader)[: hvd.size()])  # on 2 ranks: the losses of 2 batches, on both ranks
    """
    library: Any = sys.modules[__name__]
    return one_batch.decorator(
        lambda step: one_batch.mirrored(library, step, batch, check), function, "mirrored"
    )


# ---- The functions of `common.training.one_batch.StepLibrary` ------------------------------------------


def flatten(tree: Any) -> Leaves:
    """Returns the leaves of nested values by path, and a function that rebuilds them from new leaves."""
    leaves, structure = _private.tree_flatten_with_path(tree)
    return leaves, lambda others: _private.tree_unflatten(others, structure)


def is_array(leaf: Any) -> bool:
    """Returns whether it is a tensor, or an array of numpy."""
    return isinstance(leaf, Tensor | np.ndarray)


def is_floating(array: Any) -> bool:
    """Returns whether a tensor has floating or complex elements."""
    tensor = torch.as_tensor(array)
    return tensor.is_floating_point() or tensor.is_complex()


def checksum(array: Any) -> int:
    """Returns the checksum of a tensor; copies it only if it is on a GPU or not row-major."""
    return checksum_of(torch.as_tensor(array))


def check_input(array: Any, label: str, is_split: bool) -> str | None:
    """Refuses a tensor that requires a gradient, which would cover this rank's rows only."""
    if not is_split or not isinstance(array, Tensor) or not array.requires_grad:
        return None
    return (
        f"{label} requires a gradient, of which this rank would compute its rows only; pass tensor.detach(), "
        "and require the gradient inside the function"
    )


def without_gradient(array: Any) -> Any:
    """Returns a tensor that autograd does not track."""
    return torch.as_tensor(array).detach()


def summed(arrays: Sequence[Any], factors: Sequence[float], name: str) -> Sequence[Any]:
    """Returns the sums over all ranks of tensors times factors; computes 16-bit tensors in 32 bits."""
    tensors = list(map(without_gradient, arrays))
    parts = [_times(tensor, factor) for tensor, factor in zip(tensors, factors, strict=True)]
    totals = grouped_allreduce(parts, op=Sum, name=name)
    return [total.to(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)]


def _times(tensor: Tensor, factor: float) -> Tensor:
    if tensor.is_floating_point():
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if factor == 1.0:
        return tensor
    return tensor * factor if factor else torch.zeros_like(tensor)


def gathered(arrays: Sequence[Any], name: str) -> Sequence[Any]:
    """Returns the rows of all ranks, in their order."""
    return grouped_allgather(list(map(without_gradient, arrays)), name=name)


def portable(result: Any) -> Any:
    """Returns a result with its tensors in the memory of the CPU, each with no more than its own elements."""
    leaves, rebuild = flatten(result)
    return rebuild([leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf for _, leaf in leaves])


def received(result: Any, own: Any) -> Any:
    """Returns such a result on the device of this rank's own."""
    device = next((leaf.device for _, leaf in flatten(own)[0] if isinstance(leaf, Tensor)), None)
    leaves, rebuild = flatten(result)
    return rebuild([leaf.to(device) if isinstance(leaf, Tensor) else leaf for _, leaf in leaves])


@contextmanager
def during(share: Share) -> Iterator[None]:
    """Makes gradients count by rows inside, and refuses the steps of optimizers that do not exchange them."""
    if share.context.size == 1:
        yield
        return
    handle = register_optimizer_step_pre_hook(_check_optimizer)
    try:
        for reducer in GradientReducer.of_world(share.context):
            reducer.weighting.count_by_rows(share)
        yield
    finally:
        handle.remove()
        for reducer in GradientReducer.of_world(share.context):
            reducer.weighting.count_by_rows(None)


def _check_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    share = current_share()
    if share is None:  # of another rank, if ranks are threads
        return
    if not isinstance(optimizer, Wrapped):
        raise ValueError(
            f"{type(optimizer).__name__} steps inside @hvd.consistent with the gradients of this rank's rows "
            "alone: make it once, before the first step, "
            "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
        )
    exchange = getattr(optimizer, "_exchange_options", None)
    if exchange is None or exchange.deadline is not None:  # None: of averages of parameters
        raise ValueError(
            f"this {type(optimizer).__name__} does not combine the gradients of each step of all ranks, so "
            "inside @hvd.consistent its steps are not those of one device: use hvd.DistributedOptimizer "
            "without a deadline"
        )
    share.check_gradients(exchange.how.op, exchange.scope.process_set)
