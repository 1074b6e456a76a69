"""Compressions of gradients that remember on each rank what they have left out, and send it later.

These are descriptions only: an adapter's optimizer has the memory, and does the work. They are no
compressors, because a call of `allreduce` has no place for what is left over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, NoReturn

from sirtaki.bindings.errors import UnsupportedError

EXACT_EXCHANGES = 100  # the default number of exchanges that are exact at first


@dataclass(frozen=True, kw_only=True)
class StatefulCompression:
    """The options that all of them have.

    Attributes:
        start: the number of exchanges that are exact at first, while gradients change fastest.
        error_feedback: whether what is left out is added to the next gradient. Training rarely converges
            without.
    """

    start: int = EXACT_EXCHANGES
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if not _is_whole(self.start) or self.start < 0:
            raise ValueError(
                f"start is {self.start!r}, but it has to be the number of exchanges that are exact at first"
            )

    def compress(self, tensor: Any) -> NoReturn:
        """Raises ValueError: a single call has no memory."""
        raise ValueError(
            f"{self} remembers on each rank what it has left out: give it to hvd.DistributedOptimizer; "
            "single operations, op=hvd.Adasum among them, take Compression.fp16 or Compression.bf16"
        )


@dataclass(frozen=True)
class PowerSGD(StatefulCompression):
    """Exchanges each matrix as the product of two narrow matrices (T. Vogels et al., arXiv 1905.13727).

    Attributes:
        rank: the number of columns of each narrow matrix. 1 to 4 are usual; more of them leave out less.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_whole(self.rank) or self.rank < 1:
            raise ValueError(f"rank is {self.rank!r}, but it has to be a whole number, 1 at least")


@dataclass(frozen=True)
class TopK(StatefulCompression):
    """Exchanges the elements of the largest magnitude, with their positions.

    Attributes:
        fraction: the part of a tensor's elements that is sent.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.fraction, bool) or not (0 < self.fraction < 1):
            raise ValueError(f"fraction is {self.fraction!r}, but it has to lie between 0 and 1")


# Subclasses without fields need no decorator, which takes a millisecond of each import.
class OneBit(StatefulCompression):
    """Exchanges the signs of a tensor's elements, and the mean of their magnitudes."""


@dataclass(frozen=True)
class Quantised(StatefulCompression):
    """Exchanges elements in 8 bits between hosts, in blocks of 256 with a common scale."""

    start: int = field(default=0, kw_only=True)
    wire_format: ClassVar[str]  # the core's name


class Int8(Quantised):
    """Exchanges multiples of 1/127 of a block's largest magnitude."""

    wire_format: ClassVar[str] = "int8"


class Fp8(Quantised):
    """Exchanges floats of 4 exponent and 3 mantissa bits, with a uniform relative error."""

    wire_format: ClassVar[str] = "fp8"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise UnsupportedError(
            f"Compression.{name} remembers what it has left out from step to step, and only the optimizers "
            "of sirtaki.torch have a place for that: here, take Compression.fp16 or Compression.bf16"
        )

    refuse.__doc__ = f"Raises UnsupportedError: {name} is available in sirtaki.torch."
    return refuse


class StatefulCompressions(NamedTuple):
    """The constructors of compressions, for a library with optimizers that can store the residuals."""

    powersgd: Callable[..., StatefulCompression] = PowerSGD
    topk: Callable[..., StatefulCompression] = TopK
    onebit: Callable[..., StatefulCompression] = OneBit
    int8: Callable[..., StatefulCompression] = Int8
    fp8: Callable[..., StatefulCompression] = Fp8


AVAILABLE = StatefulCompressions()
REFUSED = StatefulCompressions(*map(_refused, StatefulCompressions._fields))
