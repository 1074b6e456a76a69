"""The formats in which gradients and values are exchanged: unchanged, or in 16 bits. Backend-independent."""

from __future__ import annotations

from typing import Any

import keras

from sirtaki.common.ops.compression import CastingCompressor, Compressor, NoneCompressor, compressors

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _TensorCompressor(CastingCompressor):
    @staticmethod
    def dtype_of(tensor: Any) -> str:
        return keras.backend.standardize_dtype(tensor.dtype)

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return "float" in keras.backend.standardize_dtype(tensor.dtype)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return keras.ops.cast(tensor, dtype)


Compression = compressors(_TensorCompressor, "float16", "bfloat16")
FP16Compressor, BF16Compressor = Compression.fp16, Compression.bf16
