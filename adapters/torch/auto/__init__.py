"""An unmodified script of torch on several ranks: each computes its rows of every batch of the training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from sirtaki.bindings.context import find
from sirtaki.bindings.observing.user_code import user_line
from sirtaki.common.public import init
from sirtaki.common.semantics import hint
from sirtaki.torch._private import current_pass
from sirtaki.torch.auto import loaders, optimizers
from sirtaki.torch.auto.arguments import difference, is_unseen
from sirtaki.torch.auto.job import LoadedBatch, Root, job, refusal
from sirtaki.torch.auto.marks import Marking, following, mark_of

__all__ = ["has_split", "install"]


def install() -> None:
    """Prepares torch. It is called once, after torch was imported and before the script uses it."""
    if find() is None:
        init()
    context = find()
    if context is None or context.size == 1 or job.context is not None:
        return
    job.context = context
    optimizers.install()
    loaders.install()
    _observe_passes()
    torch.compile = _uncompiled
    function: Any = torch.autograd.Function
    function.apply = following(function.apply)
    torch.utils.checkpoint.checkpoint = _checkpointing(torch.utils.checkpoint.checkpoint)
    Marking().__enter__()


def has_split() -> bool:
    """Returns whether a rank has computed a part of a batch. It is called at the end of the script."""
    if job.context is not None:
        loaders.end_batch()
    return job.has_split or job.context is None


def _checkpointing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for `checkpoint`: without its second computation in a proof, which is not followed."""

    @wraps(plain)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        has_all_gradients = kwargs.get("use_reentrant") is False
        if job.batch is None or job.batch.proof is None or not has_all_gradients:
            return plain(function, *args, **kwargs)
        options = inspect.signature(plain).parameters
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    return checkpoint


def _uncompiled(model: Any = None, **options: Any) -> Any:
    """Stands for `torch.compile`: compiled code does not show what it computes from rows."""
    if job.context is not None and job.context.rank == 0:
        hint("torch.compile is ignored with --auto: the results are the same, the steps are slower")
    return model if model is not None else (lambda function: function)


# ---- Observes the script's backward passes: compares gradients in a proof; refuses losses that no proof saw


def _observe_passes() -> None:
    """Starts observing every backward pass; `Tensor.backward` calls the same function."""
    plain = torch.autograd.backward

    @wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        if current_pass() != -1:  # of checkpointing, inside another one
            return plain(*args, **kwargs)
        loaders.end_closed_batch()
        optimizers.adopt()
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
