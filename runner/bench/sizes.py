"""Sizes of tensors as the command line takes them, and the dtypes that can be measured."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence

from sirtaki.runner.bench.operations import BenchOperation
from sirtaki.runner.cli.options import number_above
from sirtaki.runner.launch.errors import LaunchError

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
