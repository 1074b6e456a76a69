"""The functions of torch that read a tensor's properties, but none of its elements."""

from __future__ import annotations

from typing import Any

from torch import Tensor

NEEDS_NO_ELEMENTS: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("device", "dtype", "layout", "shape", "ndim")),
        *(getattr(Tensor, name).__get__ for name in ("is_cpu", "is_cuda", "is_sparse", "is_meta")),
        *(getattr(Tensor, name).__get__ for name in ("grad_fn", "requires_grad", "is_leaf")),
        *(getattr(Tensor, name) for name in ("size", "dim", "numel", "element_size", "get_device")),
        *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "requires_grad_")),
        Tensor.__hash__,
    }
)
