"""The argument `compression` of an optimizer, and what it cannot be combined with."""

from __future__ import annotations

from typing import Any

from sirtaki.common.groups import Groups
from sirtaki.common.ops import Average, Sum
from sirtaki.common.stateful_compression import StatefulCompression
from sirtaki.torch.compressed.state import CompressionState
from sirtaki.torch.compression import Compressor, NoneCompressor


def plain_and_memory(
    compression: Any, op: int, groups: Groups
) -> tuple[type[Compressor], CompressionState | None]:
    """Returns the format of gradients that are exchanged as a whole, and the memory of a compression.

    Raises:
        ValueError: not a compression, or one that does not go with these arguments.
    """
    if not isinstance(compression, StatefulCompression):
        if isinstance(compression, type) and issubclass(compression, StatefulCompression):
            raise ValueError(f"compression is the class {compression.__name__}: call it, as powersgd() does")
        return compression, None
    if op not in (Average, Sum):
        raise ValueError(
            f"{compression} adds up what it has left out, so it needs op=hvd.Average or op=hvd.Sum; take "
            "Compression.fp16 or Compression.bf16 with another op"
        )
    if groups:
        raise ValueError(
            f"{compression} exchanges all gradients together, so groups have no meaning: leave them out"
        )
    return NoneCompressor, CompressionState(compression)
