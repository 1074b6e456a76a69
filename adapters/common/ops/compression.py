"""The formats in which tensors are exchanged: unchanged, in 16 bits, or compressed with a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from sirtaki.common.training.stateful_compression import REFUSED, StatefulCompression, StatefulCompressions


class Compressor:
    """The interface of a compressor. Subclass it to define another: both methods are static and stateless."""

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


class CastingCompressor(Compressor):
    """Exchanges floating tensors in another dtype. An adapter's subclasses have the dtype and the casts."""

    dtype: ClassVar[Any]

    @staticmethod
    def dtype_of(tensor: Any) -> Any:
        """Returns a tensor's dtype, as `cast` takes it."""
        return tensor.dtype

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        """Returns whether a tensor has floating-point elements; complex elements do not count."""
        raise NotImplementedError

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Returns a tensor in another dtype; itself, if it has that."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        small = cls.cast(tensor, cls.dtype) if cls.is_floating(tensor) else tensor
        return small, cls.dtype_of(tensor)

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        return cls.cast(tensor, context)


class Compressors(Protocol):
    """The compressors of a library, and functions that create the compressions with a memory."""

    none: type[NoneCompressor]
    fp16: type[CastingCompressor]
    bf16: type[CastingCompressor]
    powersgd: Callable[..., StatefulCompression]
    topk: Callable[..., StatefulCompression]
    onebit: Callable[..., StatefulCompression]
    int8: Callable[..., StatefulCompression]
    fp8: Callable[..., StatefulCompression]


_DOCUMENT = """The available compressors.

Example:
    mean = hvd.allreduce(tensor, compression=hvd.Compression.fp16)  # 16 bits of each element are sent
"""


def compressors(
    casting: type[CastingCompressor], fp16: Any, bf16: Any, stateful: StatefulCompressions = REFUSED
) -> type[Compressors]:
    """Returns a library's `Compression` from its casts and its dtypes of 16 bits.

    `stateful` makes the compressions with a memory, or refuses them. The module of `casting` has to name the
    classes FP16Compressor and BF16Compressor, for pickle.
    """

    def derived(name: str, dtype: Any, document: str) -> type[CastingCompressor]:
        own = {"__module__": casting.__module__, "__doc__": document, "dtype": dtype}
        return type(name, (casting,), own)

    members = {
        "__module__": casting.__module__,
        "__doc__": _DOCUMENT,
        "none": NoneCompressor,
        "fp16": derived(
            "FP16Compressor", fp16, "Exchanges floating tensors as float16: exact to 3 digits, up to 65,504."
        ),
        "bf16": derived(
            "BF16Compressor",
            bf16,
            "Exchanges floating tensors as bfloat16: exact to 2 digits, with the range of float32.",
        ),
        **{name: staticmethod(make) for name, make in stateful._asdict().items()},
    }
    return type("Compression", (), members)


def compressed(
    compression: type[Compressor], tensors: Sequence[Any], exchange: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Returns the results of an exchange of tensors that is made in a compressor's format."""
    if compression is NoneCompressor:
        return list(exchange(tensors))
    small = [compression.compress(tensor) for tensor in tensors]
    results = exchange([array for array, _ in small])
    return [compression.decompress(result, undo) for result, (_, undo) in zip(results, small, strict=True)]
