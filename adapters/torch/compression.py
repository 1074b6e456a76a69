"""The formats in which tensors are exchanged: unchanged, or in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The interface of a compressor. Subclass it to make one: both methods are static and stateless."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the tensor to exchange instead of `tensor`, and what `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        """Returns the exchanged tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Exchanges tensors unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: None) -> Tensor:
        return tensor


def _converted(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, torch.dtype]:
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor), tensor.dtype


class FP16Compressor(Compressor):
    """Exchanges floating tensors as float16: exact to 3 digits, up to 65,504."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return _converted(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: Tensor, context: torch.dtype) -> Tensor:
        return tensor.to(context)


class BF16Compressor(Compressor):
    """Exchanges floating tensors as bfloat16: exact to 2 digits, with the range of float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return _converted(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: Tensor, context: torch.dtype) -> Tensor:
        return tensor.to(context)


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
