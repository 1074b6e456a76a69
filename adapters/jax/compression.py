"""The formats in which arrays are exchanged: unchanged, or in 16 bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


class Compressor:
    """The interface of a compressor. Subclass it to make one: both are static, stateless and traceable."""

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        """Returns the array to exchange instead of `array`, and what `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(array: Any, context: Any) -> Any:
        """Returns the exchanged array in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Exchanges arrays unchanged."""

    @staticmethod
    def compress(array: Any) -> tuple[Any, None]:
        return array, None

    @staticmethod
    def decompress(array: Any, context: None) -> Any:
        return array


def _converted(array: Any, dtype: Any) -> tuple[Any, Any]:
    return (array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array), array.dtype


class FP16Compressor(Compressor):
    """Exchanges floating arrays as float16: exact to 3 digits, up to 65,504."""

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        return _converted(array, jnp.float16)

    @staticmethod
    def decompress(array: Any, context: Any) -> Any:
        return array.astype(context)


class BF16Compressor(Compressor):
    """Exchanges floating arrays as bfloat16: exact to 2 digits, with the range of float32."""

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        return _converted(array, jnp.bfloat16)

    @staticmethod
    def decompress(array: Any, context: Any) -> Any:
        return array.astype(context)


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
