"""Error feedback: adds the rounding error of a step's wire format to the values of the next step."""

from __future__ import annotations

from typing import NamedTuple

from sirtaki.bindings.errors import error_of
from sirtaki.bindings.library import ffi, lib


class Squares(NamedTuple):
    """Sums of squares over all blocks of finite numbers; sums of several calls add up.

    Attributes:
        wanted: of the values that were to be rounded.
        error: of their differences from the rounded ones.
    """

    wanted: float = 0.0
    error: float = 0.0


def quantise(wire_format: int, values: int, residuals: int, count: int) -> Squares:
    """Rounds floats in memory to what a wire format can express, and keeps the differences.

    The residuals of the previous step are added before. An all-reduce in this format then encodes the values
    without a further error. In a block with a NaN or an infinity all values become NaN, and the residuals
    remain as they were.

    Args:
        wire_format: the core's code of a format with blocks.
        values: the address of `count` contiguous values of float32, row by row; they are overwritten.
        residuals: the address of as many residuals, which are overwritten; 0: there are none.
        count: how many.

    Raises:
        ValueError: there is no such format with blocks.
    """
    squares = ffi.new("double[2]")
    status = lib.srt_quantise(wire_format, values, residuals, count, squares)
    if status != lib.SRT_OK:
        raise error_of(status, f"values cannot be rounded to the wire format {wire_format}")
    return Squares(squares[0], squares[1])
