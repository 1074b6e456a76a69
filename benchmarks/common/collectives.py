"""The measured collective operations: each rank's input, its expected result, and how bytes are counted.

Sizes and bus bandwidth are counted as NVIDIA's nccl-tests do (their doc/PERFORMANCE.md): the size is that of
the larger of a rank's input and output, and busbw is algbw times a factor of the number of ranks n, chosen so
that busbw is comparable with the bandwidth of the memory or the wire for every operation and n.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Call = Callable[[], Any]  # returns the result: what numpy.asarray understands, or a list of that, or None
GROUP_SIZE = 32  # tensors of a grouped all-reduce


@dataclass(frozen=True)
class Collective:
    """One collective operation on `count` float32 elements among n ranks."""

    title: str
    bus_factor: Callable[[int], float]
    input_count: Callable[[int, int], int]  # (count, n): number of input elements per rank
    expected: Callable[[list[Array], int], Array]  # (all ranks' inputs, rank): that rank's result


def _whole(count: int, _ranks: int) -> int:
    return count


def _one(_ranks: int) -> float:
    return 1.0


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _sum(inputs: list[Array], _rank: int) -> Array:
    return np.sum(inputs, axis=0, dtype=np.float32)


def _part(array: Array, rank: int, ranks: int) -> Array:
    return array.reshape(ranks, -1)[rank]


COLLECTIVES: dict[str, Collective] = {
    "allreduce": Collective("All-reduce, sum in place", lambda n: 2 * _others(n), _whole, _sum),
    "grouped_allreduce": Collective(
        f"Grouped all-reduce of {GROUP_SIZE} tensors, sum in place", lambda n: 2 * _others(n), _whole, _sum
    ),
    "broadcast": Collective("Broadcast in place", _one, _whole, lambda inputs, _: inputs[0]),
    "allgather": Collective(
        "All-gather", _others, lambda count, n: count // n, lambda inputs, _: np.concatenate(inputs)
    ),
    "reducescatter": Collective(
        "Reduce-scatter, sum",
        _others,
        _whole,
        lambda inputs, rank: _part(_sum(inputs, rank), rank, len(inputs)),
    ),
    "alltoall": Collective(
        "All-to-all, even",
        _others,
        _whole,
        lambda inputs, rank: np.concatenate([_part(one, rank, len(inputs)) for one in inputs]),
    ),
    "sendrecv": Collective(
        "Send to the next rank, receive from the one before", _one, _whole, lambda inputs, r: inputs[r - 1]
    ),
    "barrier": Collective("Barrier", _one, lambda *_: 0, lambda inputs, _: inputs[0]),
}


def pattern(count: int, rank: int) -> Array:
    """Returns a rank's input: small whole numbers, so that sums are exact in any order."""
    return (np.arange(count, dtype=np.float32) % 97) * (rank + 1)


def check(name: str, result: Any, count: int, rank: int, ranks: int) -> None:
    """Ends the process unless `result` is this rank's result of an operation on the ranks' patterns."""
    if result is None:
        return
    parts = result if isinstance(result, list) else [result]
    got = np.concatenate([np.asarray(part) for part in parts])
    collective = COLLECTIVES[name]
    inputs = [pattern(collective.input_count(count, ranks), other) for other in range(ranks)]
    if not np.array_equal(got, collective.expected(inputs, rank)):
        sys.exit(f"rank {rank}: the result of {name} on {count} elements is wrong")
