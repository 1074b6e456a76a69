"""The formats in which tensors are exchanged: unchanged, or in 16 bits."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sirtaki.common.compression import CastingCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _HalfCompressor(CastingCompressor):
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return tensor.dtype.is_floating

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)


class FP16Compressor(_HalfCompressor):
    """Exchanges floating tensors as float16: exact to 3 digits, up to 65,504."""

    dtype = tf.float16


class BF16Compressor(_HalfCompressor):
    """Exchanges floating tensors as bfloat16: exact to 2 digits, with the range of float32."""

    dtype = tf.bfloat16


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
