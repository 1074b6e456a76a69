"""int8 and fp8: gradients in 8 bits on their way between hosts, in blocks that have a scale each.

The core rounds inside its all-reduce: each rank's values when they are sent, and their sum once more. Here
they are rounded before, in the same way, so that the first rounding is known, and what it leaves out is added
to the next gradient. The second is the same on all ranks, and is not fed back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.library import WireFormat, quantise, wire_formats
from sirtaki.common.semantics import hint
from sirtaki.common.training.stateful_compression import Quantised
from sirtaki.torch.training.compressed.method import Link, Method, Phases, TensorSlot, compute_dtype
from sirtaki.torch.training.compressed.state import CompressionState


def wire_format_of(compression: Quantised) -> WireFormat:
    """Returns the core's format of such a compression."""
    return next(wire_format for wire_format in wire_formats() if wire_format.name == compression.wire_format)


def can_encode(tensor: Tensor, wire_format: WireFormat) -> bool:
    """Returns whether a tensor is encoded, as 32-bit values, in a format; other tensors are sent exactly.

    Raises:
        UnsupportedError: it is on a GPU.
    """
    if tensor.is_complex():
        return False
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"Compression.{wire_format.name} is for parameters in the memory of the CPU, and one is on "
            f"{tensor.device}: take Compression.fp16, Compression.bf16 or Compression.powersgd()"
        )
    return compute_dtype(tensor.dtype) == torch.float32 and tensor.numel() > 0


def hint_at_shared_memory(wire_format: WireFormat) -> None:
    """Warns that a format has no effect here."""
    hint(
        f"Compression.{wire_format.name} has no effect: all ranks share the memory of one host, where "
        "rounding would only take time"
    )


class QuantisedMethod(Method):
    """Quantises an optimizer's gradients of 32 and 16 bits; gradients of 64 bits are sent exactly."""

    def __init__(self, state: CompressionState, link: Link) -> None:
        super().__init__(state, link)
        assert isinstance(state.compression, Quantised)
        self._format = wire_format_of(state.compression)
        self._sent: dict[int, Tensor] = {}  # the rounded values, then their combination
        self._errors: dict[int, Tensor] = {}
        if link.shares_memory:
            hint_at_shared_memory(self._format)

    def compresses(self, parameter: Tensor) -> bool:
        return not self._link.shares_memory and can_encode(parameter, self._format)

    def phases(self, slots: Mapping[int, TensorSlot]) -> Phases[bool]:
        marks = torch.tensor([float(slot.is_new) for slot in slots.values()])
        yield self._link.all_reduce([marks], "(marks)")
        self._touched = [at for at, mark in zip(slots, marks.tolist(), strict=True) if mark != 0]
        if not self._touched:
            return True
        for at in self._touched:
            self._round(at, slots[at].values)
        sent = [self._sent[at] for at in self._touched]
        yield self._link.all_reduce(sent, "(values)", self._format)
        return all(bool(tensor.isfinite().all()) for tensor in sent)

    def store(self, number: int, slot: TensorSlot, residual: Tensor | None) -> None:
        if residual is not None:
            residual.copy_(self._errors[number])
        slot.values.copy_(self._sent[number])

    def _round(self, number: int, values: Tensor) -> None:
        """Rounds a copy of the values, and keeps what that leaves out."""
        if number not in self._sent:  # memory for all later rounds
            self._sent[number] = torch.empty_like(values)
        sent = self._sent[number].copy_(values)
        if not self._state.compression.error_feedback:
            return
        if number not in self._errors:
            self._errors[number] = torch.empty_like(values)
        errors = self._errors[number].zero_()
        quantise(self._format.code, sent.data_ptr(), errors.data_ptr(), sent.numel())
