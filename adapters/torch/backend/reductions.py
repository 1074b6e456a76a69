"""The reduce operations of torch.distributed, as those of the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from sirtaki.bindings import request as core
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops import Reduction
from sirtaki.torch.tensors import plain_name

# ReduceOp's members compare equal to a ReduceOp, but have another hash: the tables are searched.
_REDUCTIONS = [
    (ReduceOp.SUM, core.SUM),
    (ReduceOp.AVG, core.AVERAGE),
    (ReduceOp.MIN, core.MIN),
    (ReduceOp.MAX, core.MAX),
    (ReduceOp.PRODUCT, core.PRODUCT),
]
_LOGICAL = [(ReduceOp.SUM, core.MAX), (ReduceOp.BOR, core.MAX), (ReduceOp.BAND, core.MIN)]
_BITWISE: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
    (ReduceOp.BAND, torch.bitwise_and),
    (ReduceOp.BOR, torch.bitwise_or),
    (ReduceOp.BXOR, torch.bitwise_xor),
]


def _found(table: list[tuple[Any, Any]], op: Any) -> Any:
    return next((result for known, result in table if op == known), None)


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction | None:
    """Returns the core's reduction; None for one that the core does not have: see `bitwise_of`.

    A sum of truth values is their maximum, as in NCCL's backend. The core refuses what a dtype cannot do.
    """
    code = _found(_LOGICAL, op) if dtype is torch.bool else None
    if code is None:
        code = _found(_REDUCTIONS, op)
    if code is not None:
        return Reduction(code)
    return Reduction(core.SUM, prescale=_factor_of(op)) if op == ReduceOp.PREMUL_SUM else None


def _factor_of(op: Any) -> float:
    factor = getattr(op, "factor", None)
    if isinstance(factor, Tensor) and factor.numel() == 1:
        factor = factor.item()
    if not isinstance(factor, int | float):
        raise UnsupportedError(
            "PREMUL_SUM works with one factor for all elements, and with a torch that lets it be read: "
            "multiply the tensor, and use SUM"
        )
    return float(factor)


def bitwise_of(op: Any, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function of two tensors that a bitwise reduction applies.

    Raises:
        UnsupportedError: the operation does not exist for this dtype.
    """
    combine: Callable[[Tensor, Tensor], Tensor] | None = _found(_BITWISE, op)
    if combine is None or dtype.is_floating_point or dtype.is_complex:
        raise UnsupportedError(
            f"{op} cannot combine elements of dtype {plain_name(dtype)}: bitwise operations are for integers "
            "and truth values"
        )
    return combine
