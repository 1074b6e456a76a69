"""The formats in which tensors are exchanged: unchanged, or in 16 bits."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sirtaki.common.ops.compression import CastingCompressor, Compressor, NoneCompressor, compressors

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _TensorCompressor(CastingCompressor):
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return tensor.dtype.is_floating

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)


Compression = compressors(_TensorCompressor, tf.float16, tf.bfloat16)
FP16Compressor, BF16Compressor = Compression.fp16, Compression.bf16
