"""Collective operations on TensorFlow's tensors.

Every rank of the process set has to call the same operations with the same names. They work eagerly and
in `tf.function`, loops and branches included, and can be differentiated:
`sirtaki.tensorflow.ops.gradients` states how. Operations without a name are numbered: in a function where
it is traced, else by kind. Errors that can be detected at once raise ValueError; others are raised where
the operation runs, as one of tf.errors: InvalidArgumentError if the ranks disagree (the next operation
works), AbortedError if a rank died, FailedPreconditionError before init().

They run on the CPU; TensorFlow copies tensors that are on a GPU. `device_dense` and `device_sparse`, which
tell Horovod where to run, are accepted and ignored, and so is `ignore_name_scope`: names are used as given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sirtaki.bindings import request as core
from sirtaki.bindings.context import find
from sirtaki.common.ops.compression import compressed
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Average, Reduction, averages_over_contributors, reduction
from sirtaki.tensorflow.ops import gradients as _gradients  # noqa: F401  # it registers them
from sirtaki.tensorflow.ops import operations
from sirtaki.tensorflow.ops.compression import Compression, Compressor
from sirtaki.tensorflow.ops.library import as_written
from sirtaki.tensorflow.ops.op_names import set_number
from sirtaki.tensorflow.ops.operations import Call, call
from sirtaki.tensorflow.ops.topology_ops import members

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_reducescatter",
    "reducescatter",
]

_Combine = Callable[[Sequence[tf.Tensor], Reduction, Call], list[tf.Tensor]]


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combines a tensor over all ranks of the set, element by element. All of them must call it.

    Args:
        tensor: a tensor, variable or array of any shape, the same on every rank, of a numeric dtype; bool for
            Min, Max and Product; complex for Sum and Average. Or tf.IndexedSlices, for Sum and Average: the
            ranks' slices are concatenated, which represents their sum.
        average: the older form of op=Average (True) or op=Sum (False).
        compression: Compression.fp16 or Compression.bf16 to exchange floating elements in 16 bits.
        op: Average (default), Sum, Min, Max, Product, or Adasum (floating dtypes). An integer Average
            truncates toward zero.
        prescale_factor, postscale_factor: multiply before and after the combination.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.
        device_dense, device_sparse, ignore_name_scope: see above.

    Returns:
        A tensor of the same shape and dtype, the same on every rank; tf.IndexedSlices if they were given.

    Raises:
        ValueError: op and average together, an unknown op, a set that is not in use, or a function that XLA
            compiles.
        NotImplementedError: tf.IndexedSlices with another op, or with factors.
        tf.errors.InvalidArgumentError: ranks disagree about dtype, shape, op or factors.
        tf.errors.AbortedError: a rank died.

    Example:
        loss = hvd.allreduce(loss)  # the mean over all ranks
        samples = hvd.allreduce(tf.shape(inputs)[0], op=hvd.Sum)  # 4 samples on each of 2 ranks: 8
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    return _allreduce([tensor], how, compression, name, process_set)[0]


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Works like `allreduce`, for a list of tensors of any dtypes, as a single operation.

    Dense tensors and tf.IndexedSlices may be mixed. Returns the list of results.

    Example:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs) - targets))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = hvd.grouped_allreduce(gradients)  # the means over all ranks
        optimizer.apply(gradients, model.trainable_variables)
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    return _allreduce(tensors, how, compression, name, process_set)


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Combines a tensor over all ranks of the set, and gives each its part of the rows. All must call it.

    Args:
        tensor: with at least one dimension, of the same shape on every rank and of a dtype as for
            `allreduce`.
        op: Average, Sum, Min, Max or Product.
        compression, name, process_set, prescale_factor, postscale_factor: as for `allreduce`.
        device_dense, ignore_name_scope: see above.

    Returns:
        This rank's rows of the combination. Dimension 0 is divided in the order of ranks; if it does not
        divide evenly, the first `rows % size` ranks get one more row.

    Raises:
        ValueError, tf.errors.InvalidArgumentError, tf.errors.AbortedError: as for `allreduce`.

    Example:
        rows = hvd.reducescatter(tensor, op=hvd.Sum)  # on 2 ranks: one of the 2 rows of the sum
    """
    how = reduction(op, None, prescale_factor, postscale_factor)
    called = call("reducescatter", name, set_number(process_set))
    return _compressed(operations.reducescatter, [tensor], how, compression, called)[0]


@as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Works like `reducescatter`, for a list of tensors that complete together. Returns a list.

    Example:
        parts = hvd.grouped_reducescatter(tensors, op=hvd.Sum)  # this rank's rows of each sum
    """
    how = reduction(op, None, prescale_factor, postscale_factor)
    if not tensors:
        return []
    called = call("grouped_reducescatter", name, set_number(process_set))
    return _compressed(operations.reducescatter, tensors, how, compression, called)


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

    Example:
        predictions = hvd.allgather(model(inputs))  # 4 rows on each of 2 ranks: 8, rank 0's first
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
    """Works like `allgather`, for a list of tensors that complete together. Returns a list.

    Example:
        predictions, labels = hvd.grouped_allgather([model(inputs), targets])
    """
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

    Example:
        seed = hvd.broadcast(tf.random.uniform([2], maxval=1 << 30, dtype=tf.int32), root_rank=0)
        noise = tf.random.stateless_normal(inputs.shape, seed)  # the same on all ranks
    """
    return grouped_broadcast([tensor], root_rank, name, process_set)[0]


@as_written
def grouped_broadcast(
    tensors: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Works like `broadcast`, for tensors of any dtypes that complete together. Returns their list.

    Example:
        mean, variance = tf.nn.moments(inputs, axes=[0])
        mean, variance = hvd.grouped_broadcast([mean, variance], root_rank=0)  # those of rank 0's data
    """
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

    Example:
        table = tf.Variable(tf.random.normal([100, 8]))
        hvd.broadcast_([table], root_rank=0)  # now it has rank 0's values on all ranks
    """
    wrong = next((variable for variable in variables if not hasattr(variable, "assign")), None)
    if wrong is not None:
        raise ValueError(f"broadcast_ overwrites variables; {type(wrong).__name__} is none: use broadcast()")
    values = grouped_broadcast(variables, root_rank, name, process_set)
    written = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    if tf.executing_eagerly() or tf.inside_function():
        return list(variables)
    with tf.control_dependencies([tensor.op for tensor in written]):
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

    Example:
        splits = [3, 1]  # 3 rows for rank 0, 1 row for rank 1
        received, counts = hvd.alltoall(inputs, splits)  # 6 rows on rank 0, 2 rows on rank 1
    """
    with tf.device(operations.CPU):
        counts = tf.cast([] if splits is None else splits, tf.int64)
    if splits is not None and counts.shape.num_elements() == 0:
        raise ValueError("splits is empty: it needs the number of rows for each rank")
    called = call("alltoall", name, set_number(process_set))
    moved, received = operations.alltoall(tf.convert_to_tensor(tensor), counts, called)
    return moved if splits is None else (moved, tf.cast(received, tf.int32))


def _allreduce(
    tensors: Sequence[Any],
    how: Reduction,
    compression: type[Compressor],
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    number = set_number(process_set)
    sparse = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
    dense = [tensor for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
    added, reduced = iter(()), iter(())
    if sparse:
        called = call("sparse_allreduce", None if name is None else f"{name}.slices", number)
        added = iter(_add_slices(sparse, how, called))
    if dense:
        called = call("allreduce" if len(tensors) == 1 else "grouped_allreduce", name, number)
        reduced = iter(_compressed(operations.allreduce, dense, how, compression, called))
    return [next(added if isinstance(tensor, tf.IndexedSlices) else reduced) for tensor in tensors]


def _add_slices(tensors: list[tf.IndexedSlices], how: Reduction, called: Call) -> list[tf.IndexedSlices]:
    """Concatenates the ranks' slices: tf.IndexedSlices may repeat an index, which adds its slices."""
    if how.op not in (core.SUM, core.AVERAGE) or (how.prescale, how.postscale) != (1.0, 1.0):
        raise NotImplementedError(
            "tf.IndexedSlices are exchanged with op=Average or op=Sum and without factors; for anything else "
            "make them dense first, with tf.convert_to_tensor() or sparse_as_dense=True"
        )
    parts = [part for tensor in tensors for part in (tensor.values, tensor.indices)]
    has_marks = how.op == core.AVERAGE and averages_over_contributors(find())
    marks = [tf.ones([1], tf.uint8)] * has_marks  # ranks that have joined send none
    gathered = operations.allgather(parts + marks, called)
    count = tf.size(gathered[-1] if has_marks else members(called.process_set))
    results = []
    pairs = zip(gathered[0 : len(parts) : 2], gathered[1 : len(parts) : 2], strict=True)
    for tensor, (values, indices) in zip(tensors, pairs, strict=True):
        scaled = values / tf.cast(count, values.dtype) if how.op == core.AVERAGE else values
        results.append(tf.IndexedSlices(scaled, indices, tensor.dense_shape))
    return results


def _compressed(
    combine: _Combine, tensors: Sequence[Any], how: Reduction, compression: type[Compressor], called: Call
) -> list[tf.Tensor]:
    dense = [tf.convert_to_tensor(tensor) for tensor in tensors]
    return compressed(compression, dense, lambda small: combine(small, how, called))
