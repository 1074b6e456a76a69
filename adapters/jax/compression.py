"""The formats in which arrays are exchanged: unchanged, or in 16 bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from sirtaki.common.compression import CastingCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _HalfCompressor(CastingCompressor):
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return jnp.issubdtype(tensor.dtype, jnp.floating)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


class FP16Compressor(_HalfCompressor):
    """Exchanges floating arrays as float16: exact to 3 digits, up to 65,504."""

    dtype = jnp.float16


class BF16Compressor(_HalfCompressor):
    """Exchanges floating arrays as bfloat16: exact to 2 digits, with the range of float32."""

    dtype = jnp.bfloat16


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
