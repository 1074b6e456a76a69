"""Broadcasts of tensors, alone or in nested values, of which the other ranks may not have the tensors yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.common.ops.handles import run
from sirtaki.common.ops.process_sets import ProcessSet
from sirtaki.common.ops.requests import BROADCAST_IN_PLACE, Call, CollectiveOptions
from sirtaki.torch.ops.autograd import COLLECTIVES
from sirtaki.torch.ops.nested import Path, mapped
from sirtaki.torch.ops.tensors import code_of, refuse_overlap, written


def broadcast_all(
    context: Context, named: Sequence[tuple[str, Tensor]], root: int, process_set: ProcessSet
) -> None:
    """Broadcasts tensors in place, all at once."""
    if not named:
        return
    sources: list[Tensor] = []
    storages: set[int] = set()
    for name, tensor in named:
        code_of(tensor, name)
        refuse_overlap(tensor, name)
        # Tensors may share their memory (tied weights), but each operation needs its own.
        storage = tensor.untyped_storage().data_ptr()
        sources.append(tensor.detach().clone() if storage in storages else tensor)
        storages.add(storage)
    number = process_set.number(context)
    calls = [Call(name, number) for name, _ in named]
    options = CollectiveOptions(root=root)
    results = run(context, COLLECTIVES.named(context, BROADCAST_IN_PLACE, sources, options, calls))
    for (_, tensor), source, result in zip(named, sources, results, strict=True):
        if source is not tensor:
            written(tensor, result)


@dataclass(frozen=True)
class Placeholder:
    """A placeholder for a tensor in nested values that are sent; has the tensor's checksum if it is known."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: str  # "cpu" or "cuda"
    checksum: int = 0

    @classmethod
    def of(cls, tensor: Tensor, checksum: int = 0) -> Placeholder:
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device.type, checksum)

    def fits(self, own: Any) -> bool:
        """Returns whether this rank's own tensor can stand here."""
        return isinstance(own, Tensor) and Placeholder.of(own, self.checksum) == self

    def empty(self, gpu: torch.device | None) -> Tensor:
        """Returns a new, uninitialised tensor; `gpu` is this rank's GPU, if any."""
        device = gpu if self.place == "cuda" and gpu is not None else self.place
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def described(value: Any, checksum: Callable[[Tensor], int] = lambda _: 0) -> Any:
    """Copies nested values, with a placeholder for each tensor."""

    def describe(_: Path, leaf: Any) -> Any:
        return Placeholder.of(leaf, checksum(leaf)) if isinstance(leaf, Tensor) else leaf

    return mapped(value, describe)


def filled(value: Any, tensor_for: Callable[[Path, Placeholder], Tensor]) -> tuple[Any, dict[Path, Tensor]]:
    """Copies nested values, with a tensor for each placeholder; also returns these tensors by their paths."""
    tensors: dict[Path, Tensor] = {}

    def fill(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Placeholder):
            return leaf
        tensors[path] = tensor_for(path, leaf)
        return tensors[path]

    return mapped(value, fill), tensors
