"""An unmodified script of torch on several ranks: each computes its rows of every batch of the training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.utils.checkpoint

from sirtaki.bindings.default_context import find
from sirtaki.common.hints import hint
from sirtaki.common.public import init
from sirtaki.torch.auto import backward, loaders, optimizers
from sirtaki.torch.auto.job import job
from sirtaki.torch.auto.marks import Marking, following

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
    backward.install()
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
