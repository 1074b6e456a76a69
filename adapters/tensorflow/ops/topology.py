"""The facts of the world as numbers, which functions of TensorFlow must not keep in an elastic job."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from sirtaki.common import basics
from sirtaki.common.ops import joining
from sirtaki.common.ops import reduction as ops
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.numpy.worlds import is_elastic
from sirtaki.tensorflow.ops import operations
from sirtaki.tensorflow.ops.autograph import as_written
from sirtaki.tensorflow.ops.op_names import set_number
from sirtaki.tensorflow.ops.operations import call

__all__ = ["local_rank", "local_size", "rank", "size"]


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
