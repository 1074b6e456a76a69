"""Operations that move no data: barriers, and the end of a rank's data."""

from __future__ import annotations

import tensorflow as tf

from sirtaki.common import joining, ops
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.tensorflow import operations
from sirtaki.tensorflow.autograph import as_written
from sirtaki.tensorflow.op_names import set_number
from sirtaki.tensorflow.operations import call


@as_written
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Returns once every rank of the process set has called it; in a function, is an operation that ends
    then.

    Raises:
        ValueError: this rank does not belong to the set.
        PeerLostError, tf.errors.AbortedError: a rank died (eagerly, in a function).
    """
    if tf.executing_eagerly():
        ops.barrier(process_set, name)
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
    """
    if tf.executing_eagerly():
        return tf.constant(joining.join(process_set=process_set), tf.int32)
    return operations.join(call("join", None, set_number(process_set)))
