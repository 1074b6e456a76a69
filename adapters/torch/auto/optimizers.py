"""Makes every optimizer of a script exchange its gradients, and notes in which loader's loop it steps."""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sirtaki.bindings.observing.user_code import user_line
from sirtaki.common.semantics import hint
from sirtaki.torch._private import without_functions
from sirtaki.torch.auto.job import LoadedBatch, job, refusal
from sirtaki.torch.auto.marks import mark_of
from sirtaki.torch.state import broadcast_parameters
from sirtaki.torch.training.optimizer import DistributedOptimizer
from sirtaki.torch.training.wrapping import Wrapped

_ALONE = (
    "this step uses no batch of a DataLoader, so every rank computes all of it. If the whole script trains "
    "like this, the job fails at its end: read batches from torch.utils.data.DataLoader, or use "
    "hvd.DistributedOptimizer"
)


def install() -> None:
    """Starts noting every optimizer that is made."""
    kind: Any = torch.optim.Optimizer
    plain = kind.__init__

    @wraps(plain)
    def construct(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        job.optimizers.append(weakref.ref(self))

    kind.__init__ = construct
    register_optimizer_step_pre_hook(_steps)
    register_optimizer_step_post_hook(_stepped)


def adopt() -> None:
    """Makes the optimizers that have been made since the last call exchange gradients.

    It happens at their first use, because the constructors of subclasses go on after that of Optimizer.
    """
    for optimizer in job.alive():
        if not isinstance(optimizer, Wrapped):
            _adopt(optimizer)


def _adopt(optimizer: torch.optim.Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Autograd does not have to know: a loss may have been computed from the same values.
    broadcast_parameters(
        [(f"auto.{index}", parameter.data) for index, parameter in enumerate(parameters)], root_rank=0
    )
    distributed = DistributedOptimizer(optimizer)
    distributed._settings.has_whole_losses = True
    # Ranks compute whole batches at first, and are not to be warned that their gradients are equal.
    distributed._settings.checks_data = False
    distributed._make_reducer_again()


def _steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if job.context is None:
        return
    from sirtaki.torch.auto.loaders import end_closed_batch

    end_closed_batch()
    _check_gradients(optimizer)
    if not isinstance(optimizer, Wrapped):
        if all(item is not optimizer for item in job.alive()):  # a copy
            job.optimizers.append(weakref.ref(optimizer))
        adopt()


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Refuses gradients that the script has computed from rows by itself: no backward pass compares them."""
    if job.batch is None or job.batch.is_refused:
        return
    with without_functions():
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        marks = [mark for parameter in parameters if (mark := mark_of(parameter.grad)) is not None]
    if marks:
        raise refusal(
            f"{user_line()}: a gradient of this step was computed from the rows of a batch at "
            f"{marks[0].line}, without a backward pass that compares it with that of the whole batch: use "
            "loss.backward(), or @hvd.consistent"
        )


def _is_left(batch: LoadedBatch, optimizer: torch.optim.Optimizer) -> bool:
    """Ends a batch that was refused if the optimizer has stepped in it since: the script has left its loop,
    but keeps the iterator.
    """
    if not batch.is_refused:
        return False
    if id(optimizer) not in batch.stepped:
        batch.stepped.add(id(optimizer))
        return False
    from sirtaki.torch.auto.loaders import end_batch

    end_batch()
    return True


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    delivered, job.delivered = job.delivered, []
    if job.batch is not None and not _is_left(job.batch, optimizer):
        return
    open_ones = [item for item in delivered if not item.is_closed]
    if (job.latest is None or job.latest.is_closed) and not job.has_stepped_alone:
        job.has_stepped_alone = True
        if job.context is not None and job.context.rank == 0:
            hint(f"{user_line()}: {_ALONE}")
    if len(open_ones) > 1:
        together = [item.state for item in open_ones]
        if not all(state.was_beside_another for state in together):
            # One may have delivered a batch to look at, before the loop: the next step will tell.
            for state in together:
                state.was_beside_another = True
            return
        places = " and ".join(item.place for item in open_ones)
        raise refusal(
            f"{user_line()}: this step uses batches of several loaders at once ({places}), of which "
            "the ranks cannot compute parts: let one loader deliver them together, or use "
            "hvd.DistributedOptimizer"
        )
    for iteration in open_ones:
        iteration.state.is_training = True
