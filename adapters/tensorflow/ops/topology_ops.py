"""The world's topology as tensors, evaluated when a graph runs, not when it is traced.

A function that was traced before a later `shutdown()` and `init()` sees the new world.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from sirtaki.bindings.context import is_elastic
from sirtaki.common import basics
from sirtaki.common.ops import process_sets, requests
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.tensorflow.ops import operations, xla
from sirtaki.tensorflow.ops.library import as_written, library
from sirtaki.tensorflow.ops.op_names import set_number
from sirtaki.tensorflow.ops.operations import CPU, call

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]

_RANK, _LOCAL_RANK, _LOCAL_SIZE = 0, 2, 3


def place() -> tf.Tensor:
    """Returns rank, size, local rank, local size, cross rank and cross size, as int32."""
    xla.refuse()
    with tf.device(CPU):
        return library().sirtaki_place()


def members(process_set: int) -> tf.Tensor:
    """Returns the ranks of a process set, by the core's number of it, ascending, as int32."""
    xla.refuse()
    with tf.device(CPU):
        return library().sirtaki_members(process_set=tf.constant(process_set, tf.int32))


@as_written
def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this rank's number, an int32 scalar. FailedPreconditionError before init().

    Example:
        @tf.function
        def augmented(inputs, step):  # with other noise on each rank
            return inputs + tf.random.stateless_normal(inputs.shape, seed=[step, hvd.rank_op()])

        inputs = augmented(inputs, tf.constant(0))
    """
    return tf.identity(place()[_RANK], name=name)


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks of a process set, an int32 scalar.

    InvalidArgumentError if the set does not exist, FailedPreconditionError before init().

    Example:
        @tf.function
        def average(total):  # over the ranks that there are when it runs
            return total / tf.cast(hvd.size_op(), total.dtype)

        mean = average(hvd.allreduce(loss, op=hvd.Sum))
    """
    return tf.identity(tf.size(members(process_set_id)), name=name)


@as_written
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this rank's number on its host, an int32 scalar. FailedPreconditionError before init().

    Example:
        @tf.function
        def own_rows(rows):  # this rank's share of the rows that its host has read
            return rows[hvd.local_rank_op() :: hvd.local_size_op()]

        inputs = own_rows(inputs)
    """
    return tf.identity(place()[_LOCAL_RANK], name=name)


@as_written
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this host, an int32 scalar. FailedPreconditionError before init().

    Example:
        @tf.function
        def own_batch_size(batch_size):  # for a batch that the ranks of a host share
            return batch_size // hvd.local_size_op()

        batch_size = own_batch_size(tf.constant(64))
    """
    return tf.identity(place()[_LOCAL_SIZE], name=name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns whether this rank belongs to a process set: an int32 scalar, 1 or 0.

    InvalidArgumentError if the set does not exist, FailedPreconditionError before init().

    Example:
        readers = hvd.add_process_set([0])
        is_reader = hvd.process_set_included_op(readers.process_set_id)  # 1 on rank 0, 0 on rank 1
        hvd.remove_process_set(readers)
    """
    included = tf.reduce_any(tf.equal(members(process_set_id), place()[_RANK]))
    return tf.identity(tf.cast(included, tf.int32), name=name)


# ---- The facts of the world as numbers, which functions of TensorFlow must not keep in an elastic job --


def _outside_functions(fact: Callable[[], int]) -> Callable[[], int]:
    """Refuses a call while an elastic job traces a function, which would keep the number of this world."""

    @functools.wraps(fact)
    def checked() -> int:
        if is_elastic() and not tf.executing_eagerly():
            name = fact.__name__
            raise ValueError(
                f"hvd.{name}() is called in a function that TensorFlow traces, which would keep this number "
                f"when the ranks change; use hvd.{name}_op(), or call hvd.{name}() outside of the function"
            )
        return fact()

    return checked


rank = _outside_functions(basics.rank)
size = _outside_functions(basics.size)
local_rank = _outside_functions(basics.local_rank)
local_size = _outside_functions(basics.local_size)


# ---- Operations that move no data: barriers, and the end of a rank's data ------------------------------


@as_written
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Returns once every rank of the process set has called it; in a function, is an operation that ends
    then.

    Raises:
        ValueError: this rank does not belong to the set.
        PeerLostError, tf.errors.AbortedError: a rank died (eagerly, in a function).

    Example:
        if hvd.is_root():
            tf.io.write_file("vocabulary.txt", "one two three")
        hvd.barrier()  # now the file is complete
        words = tf.strings.split(tf.io.read_file("vocabulary.txt"))
    """
    if tf.executing_eagerly():
        requests.barrier(process_set, name)
    else:
        operations.barrier(call("barrier", name, set_number(process_set)))


@as_written
def join(*, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Signals that this rank has no more data, and waits until all ranks of the set have done so.

    Until then it takes part in the others' operations with neutral elements, such as zeros in sums; averages
    still divide by the number of all ranks, unless the setting join_average changes that.

    Returns:
        The rank that joined last, the same on all ranks, an int32 scalar.

    Raises:
        ValueError: this rank does not belong to the set, or has joined it already.
        PeerLostError, tf.errors.AbortedError: a rank died (eagerly, in a function).

    Example:
        for inputs, targets in loader[: hvd.rank() + 1]:  # ranks have different numbers of batches
            loss = hvd.allreduce(tf.reduce_mean(tf.square(model(inputs) - targets)))
        last = hvd.join()  # on 2 ranks: 1
    """
    if tf.executing_eagerly():
        return tf.constant(process_sets.join(process_set=process_set), tf.int32)
    return operations.join(call("join", None, set_number(process_set)))
