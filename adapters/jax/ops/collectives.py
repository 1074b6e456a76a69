"""Collective operations on arrays, and on trees of them, inside and outside jit.

Every rank of the process set has to call the same operations in the same order; a tree is exchanged as one
operation. Outside jit an operation returns when it has ended. Inside jit it is part of the program, and its
results are available when the program's are; docs/guide/jax.md lists what the ranks' programs must have in
common.

Wrong arguments raise ValueError, inside jit during tracing. Failures between ranks raise a
HorovodInternalError outside jit; a compiled program fails with jax.errors.JaxRuntimeError, which has the same
text.

Arrays may have any dtype that the core supports: floating and integer ones of 8 bits or more, bool and
complex.

Sums, averages and all operations that only move data can be differentiated: a derivative is that of the sum
of all ranks' losses. Under vmap a batch is exchanged as one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sirtaki.bindings import request as core
from sirtaki.bindings.context import current
from sirtaki.common.ops import requests
from sirtaki.common.ops.compression import compressed
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Average, reduction
from sirtaki.jax.ops.compression import Compression, Compressor
from sirtaki.jax.ops.exchange_options import ExchangeOptions
from sirtaki.jax.ops.primitives import bind
from sirtaki.jax.ops.programs import note_size

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "grouped_allreduce", "reducescatter"]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combines an array, or each array of a tree, over all ranks of the set. All of them must call it.

    Args:
        tensor: an array of any shape, or a tree of arrays, the same on every rank, of numeric dtypes; bool
            for Min, Max and Product; complex for Sum and Average.
        average: the older form of op=Average (True) or op=Sum (False).
        name: identifies the operation on all ranks.
        compression: Compression.fp16 or Compression.bf16 to exchange floating elements in 16 bits.
        op: Average (default), Sum, Min, Max, Product, or Adasum (floating dtypes). An integer Average
            truncates toward zero.
        prescale_factor, postscale_factor: multiply before and after the combination.
        process_set: the ranks that take part.

    Returns:
        The same array or tree, with the combination on every rank.

    Raises:
        ValueError: op and average together, an unknown op, a dtype that cannot be combined, a set that this
            rank does not belong to.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.

    Example:
        loss = hvd.allreduce(loss_of(params, inputs, targets))  # the mean over the ranks
        gradients = hvd.allreduce(gradients, compression=hvd.Compression.bf16)  # a tree, in one operation
        total = jax.jit(lambda rows: hvd.allreduce(rows.sum(0), op=hvd.Sum))(inputs)
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    options = ExchangeOptions(core.ALLREDUCE, (), name, how.op, how.prescale, how.postscale)
    return combined(tensor, options, compression, process_set)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Works like `allreduce`, for a list of arrays. Returns the list of results.

    Example:
        weights, biases = hvd.grouped_allreduce([gradients["w"], gradients["b"]])
    """
    return allreduce(
        list(tensors), average, name, compression, op, prescale_factor, postscale_factor, process_set
    )


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combines arrays over all ranks of the set, and gives each rank its part of the rows. All of them must
    call it.

    Args:
        tensor: an array with at least one dimension, or a tree of them, of the same shapes on every rank.
        op: Average, Sum, Min, Max or Product.
        name, compression, process_set, prescale_factor, postscale_factor: as for `allreduce`.

    Returns:
        This rank's rows of the combination. Dimension 0 is divided in the order of ranks. Outside jit, if it
        does not divide evenly, the first `rows % size` ranks get one more row; inside jit it has to divide
        evenly.

    Raises:
        ValueError: an unknown op, a dtype that cannot be combined, an array without dimensions, or, inside
            jit, one with rows that do not divide evenly.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.

    Example:
        own = hvd.reducescatter(gradients["w"])  # on 2 ranks: 4 of the 8 rows of the mean
    """
    how = reduction(op, None, prescale_factor, postscale_factor)
    options = ExchangeOptions(core.REDUCESCATTER, (), name, how.op, how.prescale, how.postscale)
    return combined(tensor, options, compression, process_set)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenates the ranks' arrays along dimension 0, in the order of ranks. All of the set must call it.

    Args:
        tensor: an array with at least one dimension, or a tree of them. Outside jit dimension 0 may differ
            between ranks; inside jit, where shapes are fixed, it may not.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        The same on every rank.

    Raises:
        ValueError: an array without dimensions, or of a dtype that cannot be exchanged.
        MismatchError: ranks disagree about dtype or shape.
        PeerLostError: a rank died.

    Example:
        predictions = hvd.allgather(inputs @ params["w"] + params["b"])  # on 2 ranks: 4 rows of each
    """
    return _run(tensor, ExchangeOptions(core.ALLGATHER, (), name), process_set)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copies the arrays of rank `root_rank` to all ranks of the set. All of them must call it.

    Args:
        tensor: an array, or a tree of arrays, of the same shapes on every rank; only the root's elements are
            used.
        root_rank: a rank of the world that belongs to the set.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Raises:
        ValueError: the root does not exist, or a dtype cannot be exchanged.
        MismatchError: ranks disagree about dtype, shape or root.
        PeerLostError: a rank died.

    Example:
        own = jax.random.permutation(jax.random.key(hvd.rank()), 16)
        order = hvd.broadcast(own, root_rank=0)  # rank 0's
    """
    return _run(tensor, ExchangeOptions(core.BROADCAST, (), name, root=root_rank), process_set)


def alltoall(
    tensor: Any,
    splits: Sequence[int] | Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank of the set its rows of an array; returns the rows received. All of them must call it.

    Args:
        tensor: an array with at least one dimension.
        splits: the number of rows for each rank; None: equal parts. Not inside jit, where shapes are fixed.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        The received rows, in the order of ranks; with splits a pair of them and an int32 array of the number
        of rows from each.

    Raises:
        ValueError: splits that do not fit, or rows that cannot be divided evenly.
        MismatchError: ranks disagree about dtype or the shape of rows.
        PeerLostError: a rank died.

    Example:
        rows = hvd.alltoall(inputs)  # on 2 ranks: 2 rows from each
        rows, counts = hvd.alltoall(inputs, splits=[1, 3])  # counts: [1, 1] on rank 0, [3, 3] on rank 1
    """
    if splits is None:
        return _run(tensor, ExchangeOptions(core.ALLTOALL, (), name), process_set)
    options = ExchangeOptions(core.ALLTOALL, ("",), name, splits=tuple(int(rows) for rows in splits))
    result, received = bind(_over(process_set, options), [_array(tensor, "alltoall")])
    return result, received


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Returns once every rank of the process set has called it. Not inside jit.

    Raises:
        ValueError: this rank does not belong to the set, or a program is being traced, in which a call
            without operands would have no position.
        PeerLostError: a rank died.

    Example:
        if hvd.is_root():
            jnp.savez("params.npz", **params)
        hvd.barrier()  # the file is complete
        params = dict(jnp.load("params.npz"))
    """
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise ValueError(
            "barrier() is called inside jit, where it would run once, when the program is traced, and not "
            "with it; call it outside jit. Inside, operations of all ranks wait for one another by what "
            "they exchange"
        )
    requests.barrier(process_set, name)


def _over(process_set: ProcessSet, options: ExchangeOptions) -> ExchangeOptions:
    context = current()
    if options.name is not None and not options.name.isprintable():
        raise ValueError(f"the name {options.name!r} has characters that cannot be printed; choose another")
    number = process_set.number(context)
    if process_set is not global_process_set:  # it has another number in another world
        note_size()
    depends = options.kind in (core.ALLGATHER, core.REDUCESCATTER, core.ALLTOALL)
    return options._replace(process_set=number, members=len(process_set.members(context)) if depends else 0)


def _run(tree: Any, options: ExchangeOptions, process_set: ProcessSet) -> Any:
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = tuple(jax.tree_util.keystr(path) for path, _ in named)
    over = _over(process_set, options._replace(paths=paths))
    arrays = [_array(leaf, name) for (_, leaf), name in zip(named, over.names, strict=True)]
    return structure.unflatten(bind(over, arrays))


def combined(
    tree: Any, options: ExchangeOptions, compression: type[Compressor], process_set: ProcessSet
) -> Any:
    """Returns the arrays of a tree, combined over the ranks of the set as a single operation."""
    if compression is Compression.none:
        return _run(tree, options, process_set)
    leaves, structure = jax.tree_util.tree_flatten(tree)

    def exchange(small: Sequence[Any]) -> Sequence[Any]:
        return structure.flatten_up_to(_run(structure.unflatten(small), options, process_set))

    return structure.unflatten(compressed(compression, [jnp.asarray(leaf) for leaf in leaves], exchange))


def _array(leaf: Any, name: str) -> Any:
    try:
        return jnp.asarray(leaf)
    except TypeError:
        raise TypeError(f"'{name}' is a {type(leaf).__name__}, but it has to be an array") from None
