"""The formats in which tensors are exchanged: unchanged, in 16 bits, or compressed with a memory."""

from __future__ import annotations

from typing import Any

import torch

from sirtaki.common.ops.compression import CastingCompressor, Compressor, NoneCompressor, compressors
from sirtaki.common.training.stateful_compression import AVAILABLE

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _TensorCompressor(CastingCompressor):
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return tensor.is_floating_point()

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.to(dtype)


Compression = compressors(_TensorCompressor, torch.float16, torch.bfloat16, AVAILABLE)
FP16Compressor, BF16Compressor = Compression.fp16, Compression.bf16
