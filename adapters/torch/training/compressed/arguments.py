"""The argument `compression` of an optimizer."""

from __future__ import annotations

from typing import Any

from sirtaki.common.training.stateful_compression import StatefulCompression
from sirtaki.torch.ops.compression import Compressor, NoneCompressor
from sirtaki.torch.training.compressed.state import CompressionState


def plain_and_memory(compression: Any) -> tuple[type[Compressor], CompressionState | None]:
    """Returns the format of gradients that are exchanged as a whole, and the memory of a compression.

    Raises:
        ValueError: not a compression.
    """
    if isinstance(compression, StatefulCompression):
        return NoneCompressor, CompressionState(compression)
    if isinstance(compression, type) and issubclass(compression, StatefulCompression):
        raise ValueError(f"compression is the class {compression.__name__}: call it, as powersgd() does")
    return compression, None
