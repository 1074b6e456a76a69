"""The formats in which gradients and values are exchanged: unchanged, or in 16 bits. Backend-independent."""

from __future__ import annotations

from typing import Any

import keras


class Compressor:
    """The interface of a compressor. Subclass it to make one: both methods are static and stateless."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor to exchange instead of `tensor`, and what `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Returns the exchanged tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Exchanges tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: None) -> Any:
        return tensor


def _converted(tensor: Any, dtype: str) -> tuple[Any, str]:
    own = keras.backend.standardize_dtype(tensor.dtype)
    return (keras.ops.cast(tensor, dtype) if "float" in own else tensor), own


class FP16Compressor(Compressor):
    """Exchanges floating tensors as float16: exact to 3 digits, up to 65,504."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, str]:
        return _converted(tensor, "float16")

    @staticmethod
    def decompress(tensor: Any, context: str) -> Any:
        return keras.ops.cast(tensor, context)


class BF16Compressor(Compressor):
    """Exchanges floating tensors as bfloat16: exact to 2 digits, with the range of float32."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, str]:
        return _converted(tensor, "bfloat16")

    @staticmethod
    def decompress(tensor: Any, context: str) -> Any:
        return keras.ops.cast(tensor, context)


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
