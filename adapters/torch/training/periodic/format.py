"""The format in which differences of parameters are exchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirtaki.bindings.library import WireFormat
from sirtaki.common.training.stateful_compression import Quantised, StatefulCompression, TopK
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.compression import Compressor, NoneCompressor
from sirtaki.torch.training.compressed.quantised import can_encode, hint_at_shared_memory, wire_format_of
from sirtaki.torch.training.compressed.state import CompressionState, plain_and_memory


class Format(NamedTuple):
    """A format. Without a memory, what rounding leaves out of an average is lost.

    Attributes:
        compressor: makes the tensors that are exchanged instead.
        wire_format: the core's format for tensors of 32 and 16 bits; None: they are exchanged exactly.
        memory: of a compression that has one; None otherwise.
    """

    compressor: type[Compressor] = NoneCompressor
    wire_format: WireFormat | None = None
    memory: CompressionState | None = None

    def encodes(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is sent in the core's format."""
        return self.wire_format is not None and can_encode(tensor, self.wire_format)

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the tensor to exchange, and what `decompress` needs."""
        if self.encodes(tensor):
            return tensor.to(torch.float32), tensor.dtype
        return self.compressor.compress(tensor)

    def decompress(self, tensor: Tensor, undo: Any) -> Tensor:
        """Returns an exchanged tensor in its original form."""
        if self.encodes(tensor):
            return tensor.to(undo)
        return self.compressor.decompress(tensor, undo)

    def for_ranks_of(self, scope: CollectiveScope, parameters: Iterable[Tensor]) -> Format:
        """Returns the format for these ranks: exact, with a warning, if all of them share memory.

        Raises:
            UnsupportedError: a parameter is on a GPU, for which the core has no such format.
        """
        if self.wire_format is None:
            return self
        for parameter in parameters:
            self.encodes(parameter)
        context = scope.context
        if context.is_provisional:  # its ranks do not exist yet
            return EXACT
        if context.has_wire_format(scope.process_set.number(context)):
            return self
        if context.rank == 0:
            hint_at_shared_memory(self.wire_format)
        return EXACT


EXACT = Format()


def format_of(compression: Any) -> Format:
    """Returns the format that the argument `compression` of DiLoCo asks for.

    Raises:
        ValueError: not a compression.
    """
    plain, memory = plain_and_memory(compression)
    if isinstance(compression, Quantised):  # the core rounds differences once, and nothing is fed back
        return Format(wire_format=wire_format_of(compression))
    return Format(plain, memory=memory)


def memory_of_gradients(compression: Any) -> str:
    """Returns the name of a compression with memory for gradients only; "" for other compressions."""
    can_average = isinstance(compression, TopK) or (
        isinstance(compression, Quantised) and not compression.start
    )
    has_memory = isinstance(compression, StatefulCompression)
    return str(compression) if has_memory and not can_average else ""
