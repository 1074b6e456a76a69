"""The formats in which tensors are exchanged: unchanged, or in 16 bits."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """The interface of a compressor. Subclass it to make one: both methods are static and stateless."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor to exchange instead of `tensor`, and what `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Returns the exchanged tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Exchanges tensors unchanged."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: None) -> tf.Tensor:
        return tensor


def _converted(tensor: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.DType]:
    return (tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor), tensor.dtype


class FP16Compressor(Compressor):
    """Exchanges floating tensors as float16: exact to 3 digits, up to 65,504."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        return _converted(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: tf.Tensor, context: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, context)


class BF16Compressor(Compressor):
    """Exchanges floating tensors as bfloat16: exact to 2 digits, with the range of float32."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        return _converted(tensor, tf.bfloat16)

    @staticmethod
    def decompress(tensor: tf.Tensor, context: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, context)


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
