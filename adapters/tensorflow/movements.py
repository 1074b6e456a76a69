"""Collective operations on TensorFlow's tensors that only move them.

`sirtaki.tensorflow.reductions` documents what all operations have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.tensorflow import gradients as _gradients  # noqa: F401  # it registers them
from sirtaki.tensorflow import operations
from sirtaki.tensorflow.autograph import as_written
from sirtaki.tensorflow.op_names import set_number
from sirtaki.tensorflow.operations import call

__all__ = [
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_broadcast",
]


@as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates the ranks' tensors along dimension 0, in the order of ranks. All of the set must call it.

    Args:
        tensor: with at least one dimension and any dtype but strings and the like. Dimension 0 may differ
            between ranks (and be 0), the others may not.
        name: identifies the operation on all ranks.
        ignore_name_scope: accepted and ignored; names are used as given.
        process_set: the ranks that take part.

    Returns:
        A tensor that is the same on every rank; in a graph the length of its dimension 0 is unknown.

    Raises:
        ValueError: a set that is not in use, or a function that XLA compiles.
        tf.errors.InvalidArgumentError: a tensor without dimensions, or ranks disagree about dtype or the
            other dimensions.
        tf.errors.AbortedError: a rank died.
    """
    called = call("allgather", name, set_number(process_set))
    return operations.allgather([tf.convert_to_tensor(tensor)], called)[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Works like `allgather`, for a list of tensors that complete together. Returns a list."""
    if not tensors:
        return []
    called = call("grouped_allgather", name, set_number(process_set))
    return operations.allgather([tf.convert_to_tensor(tensor) for tensor in tensors], called)


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Copies rank `root_rank`'s tensor to all ranks of the set. All of them must call it.

    Args:
        tensor: of any dtype but strings and the like, of one shape and dtype on all ranks.
        root_rank: the rank whose tensor is copied: a rank of the world, also within a process set.
        name, ignore_name_scope, process_set: as for `allgather`.

    Returns:
        A tensor with the root's values.

    Raises:
        ValueError: a set that is not in use, or a function that XLA compiles.
        tf.errors.InvalidArgumentError: the rank is not in the set, or ranks disagree about dtype, shape or
        root.
        tf.errors.AbortedError: a rank died.
    """
    return grouped_broadcast([tensor], root_rank, name, process_set)[0]


@as_written
def grouped_broadcast(
    tensors: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Works like `broadcast`, for tensors of any dtypes that complete together. Returns their list."""
    if not tensors:
        return []
    called = call("broadcast" if len(tensors) == 1 else "grouped_broadcast", name, set_number(process_set))
    return operations.broadcast([tf.convert_to_tensor(tensor) for tensor in tensors], root_rank, called)


@as_written
def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrites variables with rank `root_rank`'s, and returns them. All ranks of the set must call it.

    In a graph that a session runs, the call itself overwrites nothing: it returns tensors of the new values
    instead, and running any of them overwrites all variables.

    Raises:
        ValueError: an object that is not a variable; else as for `broadcast`.
    """
    wrong = next((one for one in variables if not hasattr(one, "assign")), None)
    if wrong is not None:
        raise ValueError(f"broadcast_ overwrites variables; {type(wrong).__name__} is none: use broadcast()")
    values = grouped_broadcast(variables, root_rank, name, process_set)
    written = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    if tf.executing_eagerly() or tf.inside_function():
        return list(variables)
    with tf.control_dependencies([one.op for one in written]):
        return [variable.read_value() for variable in variables]


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank of the set its part of the rows, and returns the rows received. All must call it.

    Args:
        tensor: with at least one dimension; ranks may pass different numbers of rows, but of the same shape.
        splits: the number of rows for each rank, in the order of ranks, as integers; None: equal parts.
        name, ignore_name_scope, process_set: as for `allgather`.

    Returns:
        A tensor with the received rows, in the order of ranks; with splits, a pair of it and an int32 tensor
        of the number of rows from each.

    Raises:
        ValueError: a set that is not in use, a function that XLA compiles, or splits that are an empty list.
        tf.errors.InvalidArgumentError: rows that cannot be divided evenly; splits that are negative, too many
        or too few, or whose sum exceeds the rows; ranks disagree about dtype or the other dimensions.
        tf.errors.AbortedError: a rank died.
    """
    with tf.device(operations.CPU):
        counts = tf.cast([] if splits is None else splits, tf.int64)
    if splits is not None and counts.shape.num_elements() == 0:
        raise ValueError("splits is empty: it needs the number of rows for each rank")
    called = call("alltoall", name, set_number(process_set))
    moved, received = operations.alltoall(tf.convert_to_tensor(tensor), counts, called)
    return moved if splits is None else (moved, tf.cast(received, tf.int32))
