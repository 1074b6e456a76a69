"""Observes the script's backward passes: compares gradients in a proof; refuses losses that no proof saw."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings.observing.user_code import user_line
from sirtaki.torch._private import current_pass
from sirtaki.torch.auto.arguments import difference, is_unseen
from sirtaki.torch.auto.job import LoadedBatch, Root, job, refusal
from sirtaki.torch.auto.loaders import end_closed_batch
from sirtaki.torch.auto.marks import mark_of
from sirtaki.torch.auto.optimizers import adopt


def install() -> None:
    """Starts observing every backward pass; `Tensor.backward` calls the same function."""
    plain = torch.autograd.backward

    @wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        if current_pass() != -1:  # of checkpointing, inside another one
            return plain(*args, **kwargs)
        end_closed_batch()
        adopt()
        batch = job.batch
        if batch is None:
            return plain(*args, **kwargs)
        _check_batches(args[0] if args else kwargs["tensors"])
        if batch.proof is not None:
            return batch.proof.backward(plain, args, kwargs)
        if batch.is_part:
            _check_seen(batch)
        return plain(*args, **kwargs)

    torch.autograd.backward = backward


def _check_batches(losses: Any) -> None:
    marks = map(mark_of, [losses] if isinstance(losses, Tensor) else losses)
    earlier = next((mark.earlier for mark in marks if mark is not None and mark.earlier is not None), None)
    if earlier is not None:
        raise refusal(
            f"{user_line()}: the loss of this backward pass depends on a tensor that each rank has "
            f"computed from its rows of an earlier batch only (at {earlier}), such as a running mean or a "
            "queue, so it is not that of one process: use @hvd.consistent, or hvd.DistributedOptimizer with "
            "hvd.allreduce of what is kept"
        )


def _check_seen(batch: LoadedBatch) -> None:
    for root in batch.roots:
        if root.requires_grad and is_unseen(root):
            raise refusal(_unseen(root))


def _unseen(root: Root) -> str:
    changed = difference(root)
    if changed is not None:
        return (
            f"{root.line}: the gradients of the loss that {root.key[0]} computes are unproven: {changed}; or "
            "use @hvd.consistent"
        )
    return (
        f"{root.line}: {root.key[0]} computes a loss that was not there when a batch was computed as a whole "
        "and in parts, so its gradients are unproven: compute it from the first batch on, times 0 if need "
        "be; or use @hvd.consistent"
    )
