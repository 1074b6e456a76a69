"""Steps written for a single device, with a common batch for all ranks: `consistent` and `mirrored`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sirtaki.common.ops.requests import Sum
from sirtaki.common.training import one_batch
from sirtaki.common.training.one_batch import Leaves, Path
from sirtaki.jax.ops.collectives import allgather, allreduce
from sirtaki.jax.training.consistency import is_key
from sirtaki.jax.training.weighting import during as during
from sirtaki.numpy.consistency import checksum_of

text: Callable[[Path], str] = jax.tree_util.keystr


def consistent(
    function: Callable[..., Any] | None = None,
    /,
    *,
    batch: str | Sequence[str] = (),
    out: Any = None,
    check: bool = True,
) -> Any:
    """Decorates a step written for a single device: the whole batch in, the result for the whole batch out.

    All ranks call the step, with the same arguments, outside jit: put it above `@jax.jit`. The arrays of the
    batch are split along their first axis, the function runs with this rank's rows, and what it returns is
    combined over the ranks. Gradients that a `DistributedOptimizer` or `value_and_grad` averages are weighted
    by rows. So the same loop gives the same numbers on one rank and on several, if the loss is a mean over
    rows (or a sum, with op=Sum).

    A rank may get one row less than others, or none: it then runs with arrays of 0 rows, whose results and
    gradients do not count. Collectives that the function calls itself are not weighted.

    Args:
        batch: the name of the argument that holds the batch, or several names; each a tree of arrays that
            have equally many rows.
        out: how the ranks' results become one: "mean" (weighted by rows), "sum", "rows" (one after the other)
            or "same" (equal on all ranks, which is checked), such as parameters; for all of them, or in the
            structure of the result. Without it, floating scalars are means, truth values and texts the same;
            other results are refused.
        check: whether the arguments are compared over the ranks, which reads all arrays among them once.

    Returns:
        The function, or a decorator without one. Its results are the same on all ranks.

    Raises:
        ValueError: no such argument; in a call, on all ranks: arguments that differ between them or cannot be
            split, results that cannot be combined; or a call inside jit or grad.
        UnsupportedError: rows that differ in number, with the derivative of an operation between ranks, or
            before jax.make_user_context.

    Example:
        @hvd.consistent(batch=["inputs", "targets"], out=("mean", "same"))
        @jax.jit
        def step(params, inputs, targets):  # gets this rank's rows
            return hvd.value_and_grad(loss_of)(params, inputs, targets)

        loss, gradients = step(params, inputs, targets)  # those of the whole batch
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

    All ranks call it, with the same lists of `size()` elements, outside jit; each computes its element, and
    gets the results of all, in the order of the list.

    Args:
        batch: the name of the argument that is such a list, or several names.
        check: whether the arguments are compared over the ranks, which reads all arrays among them once.

    Returns:
        The function, or a decorator without one. The results of other ranks are pickled on their way.

    Raises:
        ValueError: no such argument; in a call, on all ranks: arguments that differ between them, or no list
            with an element for each rank; or a call inside jit or grad.

    Example:
        @hvd.mirrored(batch="batch")
        def evaluate(params, batch):  # gets this rank's batch
            inputs, targets = batch
            return float(loss_of(params, inputs, targets))

        losses = evaluate(params, list(loader)[: hvd.size()])  # on 2 ranks: of 2 batches, on both ranks
    """
    library: Any = sys.modules[__name__]
    return one_batch.decorator(
        lambda step: one_batch.mirrored(library, step, batch, check), function, "mirrored"
    )


# ---- The functions of `common.training.one_batch.StepLibrary` ------------------------------------------


def flatten(tree: Any) -> Leaves:
    """Returns the leaves of nested values by path, and a function that rebuilds them from new leaves."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return leaves, structure.unflatten


def is_array(leaf: Any) -> bool:
    """Returns whether it is an array, of JAX or of numpy."""
    return isinstance(leaf, jax.Array | np.ndarray)


def is_floating(array: Any) -> bool:
    """Returns whether an array has floating or complex elements."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


def checksum(array: Any) -> int:
    """Returns the checksum of an array."""
    return checksum_of(np.asarray(jax.random.key_data(array) if is_key(array) else array))


def check_input(array: Any, label: str, is_split: bool) -> str | None:
    """Refuses an array that has no values yet."""
    if not isinstance(array, jax.core.Tracer):
        return None
    return (
        f"{label} is part of a program that is being traced, and ranks compare and combine values outside of "
        "programs: call the step outside jit and grad, with @hvd.consistent or @hvd.mirrored above @jax.jit"
    )


def without_gradient(array: Any) -> Any:
    """Returns the array."""
    return array


def summed(arrays: Sequence[Any], factors: Sequence[float], name: str) -> Sequence[Any]:
    """Returns the sums over all ranks of arrays times factors; computes 16-bit arrays in 32 bits."""
    parts = [_times(jnp.asarray(array), factor) for array, factor in zip(arrays, factors, strict=True)]
    totals = allreduce(parts, op=Sum, name=name)
    return [total.astype(array.dtype) for total, array in zip(totals, arrays, strict=True)]


def _times(array: Any, factor: float) -> Any:
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    if factor == 1.0:
        return array
    return array * factor if factor else jnp.zeros_like(array)


def gathered(arrays: Sequence[Any], name: str) -> Sequence[Any]:
    """Returns the rows of all ranks, in their order."""
    return allgather(list(arrays), name=name)


def portable(result: Any) -> Any:
    """Returns the result: arrays are pickled by their elements."""
    return result


def received(result: Any, own: Any) -> Any:
    """Returns the result: arrays arrive on the default device."""
    return result
