"""The operations that `sirtaki bench` measures, a row each, with bytes counted as by NVIDIA's nccl-tests.

The size is that of the larger of a rank's input and output. busbw is algbw times a factor of the number of
ranks n, so that it can be compared with the bandwidth of the memory or the wire for every operation and n
(nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sirtaki.runner.cli.options import number_above
from sirtaki.runner.launch.errors import LaunchError

NO_ROOT = -1  # as nccl-tests prints it


def _once(_: int) -> float:
    return 1.0


def _others(n: int) -> float:
    return (n - 1) / n


def _both_ways(n: int) -> float:
    return 2 * _others(n)


@dataclass(frozen=True)
class BenchOperation:
    """An operation among n ranks; its tensors consist of parts of equal size.

    Attributes:
        torch, mpi: its function of torch.distributed, and its method of mpi4py's communicators.
        parts_in, parts_out: whether a rank's input, and its output, consist of one part for each rank.
        bus_factor: busbw as a multiple of algbw; of a number of hosts, also the bytes that have to leave each
            host, as a multiple of the size (in an all-to-all, for each rank of the host).
    """

    name: str
    torch: str
    mpi: str
    bus_factor: Callable[[int], float]
    parts_in: bool = False
    parts_out: bool = False
    reduces: bool = False
    is_in_place: bool = False
    has_size: bool = True
    root: int = NO_ROOT

    @property
    def redop(self) -> str:
        return "sum" if self.reduces else "none"

    def parts(self, n: int) -> int:
        """Returns the number of parts in the larger of input and output."""
        return n if self.parts_in or self.parts_out else 1

    def count(self, size: int, itemsize: int, n: int) -> int:
        """Returns the number of elements of a part, at least 1, for a size of at most `size` bytes."""
        return max(size // (itemsize * self.parts(n)), 1) if self.has_size else 0

    def input_count(self, count: int, n: int) -> int:
        return count * (n if self.parts_in else 1)

    def output_count(self, count: int, n: int) -> int:
        return count * (n if self.parts_out else 1)

    def copied(self, n: int) -> float:
        """Returns how much a plain copy with as much reading and writing would copy, as a share of the size.

        Ranks of one host have to read each rank's input at least once, and write each output once.
        """
        writes_less = self.parts_in and not self.parts_out
        return (n + 1) / (2 * n) if writes_less else 1.0


_ROWS = (
    BenchOperation("allreduce", "all_reduce", "Allreduce", _both_ways, reduces=True, is_in_place=True),
    BenchOperation("allgather", "all_gather_into_tensor", "Allgather", _others, parts_out=True),
    BenchOperation(
        "reducescatter",
        "reduce_scatter_tensor",
        "Reduce_scatter_block",
        _others,
        parts_in=True,
        reduces=True,
    ),
    BenchOperation("broadcast", "broadcast", "Bcast", _once, is_in_place=True, root=0),
    BenchOperation("alltoall", "all_to_all_single", "Alltoall", _others, parts_in=True, parts_out=True),
    BenchOperation("barrier", "barrier", "Barrier", _once, has_size=False),
)
OPERATIONS = {row.name: row for row in _ROWS}


# ---- Sizes of tensors as the command line takes them, and the dtypes that can be measured --------------


ITEMSIZES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d{1,15})([KMG]?)", re.IGNORECASE | re.ASCII)
_MOST_SIZES = 200
parse_factor = number_above(1, "a factor")  # between two sizes


def parse_size(text: str) -> int:
    """Returns bytes; K, M and G stand for binary multiples. Raises ArgumentTypeError."""
    found = _SIZE.fullmatch(text)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"it takes a size such as 8, 64K, 16M or 1G, not '{text}'")
    return int(found[1]) * _UNITS[found[2].upper()]


def counts(
    operation: BenchOperation, dtype: str, ranks: int, first: int, last: int, factor: float
) -> Sequence[int]:
    """Returns the numbers of elements of a part, for sizes from `first` to `last` bytes.

    Sizes that differ by less than an element for each rank are measured once.
    """
    sizes: list[int] = []
    size = float(first)
    while round(size) <= last and len(sizes) < _MOST_SIZES:
        sizes.append(round(size))
        size *= factor
    return list(dict.fromkeys(operation.count(size, ITEMSIZES[dtype], ranks) for size in sizes))


def check_range(first: int, last: int, factor: float) -> None:
    """Raises LaunchError if there are no sizes from `first` to `last` bytes, or too many."""
    if last < first:
        raise LaunchError(
            f"-e is {last} bytes, less than the {first} bytes of -b: give a last size that is not smaller"
        )
    if math.log(last / first, factor) >= _MOST_SIZES:
        raise LaunchError(f"there are more than {_MOST_SIZES} sizes from -b to -e: give a larger factor -f")
