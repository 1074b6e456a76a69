"""The formats in which arrays are exchanged: unchanged, or in 16 bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from sirtaki.common.ops.compression import CastingCompressor, Compressor, NoneCompressor, compressors

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _TensorCompressor(CastingCompressor):
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return jnp.issubdtype(tensor.dtype, jnp.floating)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


Compression = compressors(_TensorCompressor, jnp.float16, jnp.bfloat16)
FP16Compressor, BF16Compressor = Compression.fp16, Compression.bf16
