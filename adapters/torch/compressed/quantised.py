"""int8 and fp8: gradients in 8 bits on their way between hosts, in blocks that have a scale each.

The core rounds inside its all-reduce: each rank's values when they are sent, and their sum once more. Here
they are rounded before, in the same way, so that the first rounding is known, and what it leaves out is added
to the next gradient. The second is the same on all ranks, and is not fed back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sirtaki.bindings.error_feedback import quantise
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.library import wire_formats
from sirtaki.common.hints import hint
from sirtaki.common.stateful_compression import Quantised
from sirtaki.torch.compressed.method import Link, Method, Slot, compute_dtype
from sirtaki.torch.compressed.phases import Phases
from sirtaki.torch.compressed.state import CompressionState


class QuantisedMethod(Method):
    """The method for one optimizer's gradients of 32 and 16 bits; those of 64 bits are exchanged exactly."""

    def __init__(self, state: CompressionState, link: Link) -> None:
        super().__init__(state, link)
        assert isinstance(state.compression, Quantised)
        self._format = next(one for one in wire_formats() if one.name == state.compression.wire_format)
        self._sent: dict[int, Tensor] = {}  # the rounded values, then their combination
        self._errors: dict[int, Tensor] = {}
        self._touched: list[int] = []
        if link.shares_memory:
            hint(
                f"Compression.{self._format.name} has no effect: all ranks share the memory of one host, "
                "where rounding would only take time"
            )

    def compresses(self, parameter: Tensor) -> bool:
        if self._link.shares_memory or parameter.is_complex():
            return False
        if parameter.device.type != "cpu":
            raise UnsupportedError(
                f"Compression.{self._format.name} is for parameters in the memory of the CPU, and one is on "
                f"{parameter.device}: take Compression.fp16, Compression.bf16 or Compression.powersgd()"
            )
        return compute_dtype(parameter.dtype) == torch.float32 and parameter.numel() > 0

    def phases(self, slots: Mapping[int, Slot]) -> Phases:
        marks = torch.tensor([float(slot.is_new) for slot in slots.values()])
        yield self._link.all_reduce([marks], "(marks)")
        self._touched = [at for at, mark in zip(slots, marks.tolist(), strict=True) if mark != 0]
        if not self._touched:
            return True
        for at in self._touched:
            self._round(at, slots[at].values)
        sent = [self._sent[at] for at in self._touched]
        yield self._link.all_reduce_encoded(sent, "(values)", self._format)
        return all(bool(one.isfinite().all()) for one in sent)

    def is_touched(self, number: int) -> bool:
        return number in self._touched

    def store(self, number: int, slot: Slot, residual: Tensor | None) -> None:
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
