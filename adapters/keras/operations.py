"""Operations on values: numbers, arrays and tensors in, numpy arrays out. For gradients there is the
optimizer.

Every rank of the process set has to call the same operations, with the same names or in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from sirtaki import numpy as arrays
from sirtaki.common.ops.compression import compressed
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Average
from sirtaki.keras.compression import Compression, Compressor

__all__ = ["allgather", "allreduce", "broadcast", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combines a value over all ranks of the set, element by element. All of them must call it.

    Args:
        value: a number, an array, a tensor or a variable, of the same shape and dtype on every rank.
        name: identifies the operation on all ranks.
        average: the older form of op=Average (True) or op=Sum (False).
        prescale_factor, postscale_factor: multiply before and after the combination.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        compression: Compression.fp16 or Compression.bf16 to exchange floating elements in 16 bits.
        process_set: the ranks that take part.

    Returns:
        An array of numpy of the same shape and dtype, a scalar for a scalar; the same on every rank.

    Raises:
        ValueError: wrong arguments.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.

    Example:
        loss = hvd.allreduce(loss)  # the mean over all ranks
        samples = hvd.allreduce(len(inputs), op=hvd.Sum)  # 16 samples on each of 2 ranks: 32
    """
    given = _array(value)

    def exchange(small: Sequence[Any]) -> list[Any]:
        factors = prescale_factor, postscale_factor
        return [arrays.allreduce(_array(small[0]), average, name, op, *factors, process_set)]

    if compression is not Compression.none:
        given = keras.ops.convert_to_tensor(given)
    return _array(compressed(compression, [given], exchange)[0])[()]


def reducescatter(
    value: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Combines a value over all ranks of the set, and gives each its part of the rows. All must call it.

    Dimension 0 is divided in the order of ranks; the first `rows % size` of them get one more row. Otherwise
    it works like `allreduce`.

    Example:
        rows = hvd.reducescatter(tensor, op=hvd.Sum)  # on 2 ranks: one of the 2 rows of the sum
    """
    return arrays.reducescatter(_array(value), name=name, op=op, process_set=process_set)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenates the ranks' values along dimension 0, in their order. All ranks of the set must call it.

    Args:
        value: an array, a tensor or a variable; dimension 0 may differ between ranks, the others may not.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        An array of numpy, the same on every rank.

    Raises:
        ValueError: a value without dimensions.
        MismatchError: ranks disagree about dtype or the other dimensions.
        PeerLostError: a rank died.

    Example:
        predictions = hvd.allgather(model(inputs))  # 16 rows on each of 2 ranks: 32, rank 0's first
    """
    return arrays.allgather(_array(value), name=name, process_set=process_set)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copies rank `root_rank`'s value to all ranks of the set. All of them must call it.

    Args:
        value: a number, an array, a tensor or a variable, of one shape and dtype on all ranks.
        root_rank: the rank whose value is copied: a rank of the world, also within a process set.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        An array of numpy with the root's values, a scalar for a scalar.

    Raises:
        ValueError: rank `root_rank` does not exist, or does not belong to the set.
        MismatchError: ranks disagree about dtype, shape or root.
        PeerLostError: a rank died.

    Example:
        seed = hvd.broadcast(np.random.randint(1 << 30), root_rank=0)
        order = np.random.default_rng(seed).permutation(len(inputs))  # the same on all ranks
    """
    return arrays.broadcast(_array(value), root_rank, name=name, process_set=process_set)[()]


def _array(value: Any) -> Any:
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        return keras.ops.convert_to_numpy(value)
    return np.asarray(value)
