"""The world's topology as tensors, evaluated when a graph runs, not when it is traced.

A function that was traced before a later `shutdown()` and `init()` sees the new world.
"""

from __future__ import annotations

import tensorflow as tf

from sirtaki.tensorflow.ops import xla
from sirtaki.tensorflow.ops.autograph import as_written
from sirtaki.tensorflow.ops.library import library
from sirtaki.tensorflow.ops.operations import CPU

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
    """Returns this rank's number, an int32 scalar. FailedPreconditionError before init()."""
    return tf.identity(place()[_RANK], name=name)


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks of a process set, an int32 scalar.

    InvalidArgumentError if the set does not exist, FailedPreconditionError before init().
    """
    return tf.identity(tf.size(members(process_set_id)), name=name)


@as_written
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this rank's number on its host, an int32 scalar. FailedPreconditionError before init()."""
    return tf.identity(place()[_LOCAL_RANK], name=name)


@as_written
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this host, an int32 scalar. FailedPreconditionError before init()."""
    return tf.identity(place()[_LOCAL_SIZE], name=name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns whether this rank belongs to a process set: an int32 scalar, 1 or 0.

    InvalidArgumentError if the set does not exist, FailedPreconditionError before init().
    """
    included = tf.reduce_any(tf.equal(members(process_set_id), place()[_RANK]))
    return tf.identity(tf.cast(included, tf.int32), name=name)
