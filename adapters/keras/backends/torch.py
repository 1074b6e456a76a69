"""Gradients on the torch backend: torch's tensors, reduced in place, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import current
from sirtaki.bindings.request import ABSENT, Batch
from sirtaki.common.handles import Operation, run, spare_batch
from sirtaki.common.ops import Call, describe_allreduce, reduction
from sirtaki.keras.backends import Combination, Gradient
from sirtaki.torch import device
from sirtaki.torch.tensors import count_write, reducible_view


def is_sparse(gradient: Any) -> bool:
    """Returns False: Keras' optimizers take only dense tensors of torch; `allreduce` converts sparse ones."""
    return False


def is_eager(gradients: Sequence[Any]) -> bool:
    """Works like `Backend.is_eager`."""
    return not torch.compiler.is_compiling()


def scaled(gradient: Any, factor: float) -> Any:
    """Works like `Backend.scaled`."""
    return gradient * factor


@torch.compiler.disable
def allreduce(name: str, gradients: Sequence[Gradient], how: Combination) -> list[Any]:
    """Works like `Backend.allreduce`. Each gradient has its own name: ranks may lack different ones."""
    context = current()
    combined = reduction(how.op, None, how.prescale, how.postscale)
    number = how.process_set.number(context)
    batch = spare_batch(len(gradients))
    owners = []
    for index, gradient in enumerate(gradients):
        dense = gradient.value.to_dense() if gradient.value.is_sparse else gradient.value
        target = reducible_view(dense.detach(), gradient.name)
        describe_allreduce(batch, target, target.pointer, combined, Call(gradient.name, number), index)
        if gradient.is_absent:
            batch.set_buffers(index, 0, target.pointer)
            batch.set_flags(index, ABSENT)
        owners.append(target.owner)

    def finish(context: Context, batch: Batch) -> list[Any]:
        count_write(owners)
        return [
            None if gradient.is_absent and context.untouched(batch, index) else owners[index]
            for index, gradient in enumerate(gradients)
        ]

    return run(context, Operation(batch, owners, finish, device))
