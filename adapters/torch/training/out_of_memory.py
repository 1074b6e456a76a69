"""A batch that does not fit into the memory of a rank: all ranks skip the batch."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

import torch

from sirtaki.bindings.errors import BatchSkippedError, HorovodInternalError
from sirtaki.bindings.observing.user_code import location_of
from sirtaki.common.semantics import hint
from sirtaki.torch.training.optimizer import _Distributed
from sirtaki.torch.training.overlapped.optimizer import Overlapped
from sirtaki.torch.training.sharded.optimizer import Sharded
from sirtaki.torch.training.timely.optimizer import Timely

_OF_THE_CPU = ("can't allocate memory", "not enough memory")  # in torch's RuntimeError
_LATE = (
    "this batch ran out of memory after its gradients had been exchanged, so other ranks use it: it cannot "
    "be skipped: with several backward passes in a step, say backward_passes_per_step=N"
)


class skip_if_out_of_memory:  # noqa: N801  # used like a function
    """A context for a step: if a rank runs out of memory in it, no rank uses this batch.

    All ranks put each whole step inside, from the forward pass to `optimizer.step()`. If torch cannot
    allocate memory in the forward or the backward pass of a rank, that rank warns with the line; then the
    step ends on all ranks, gradients are cleared, and no parameter changes. Nothing is exchanged besides
    what a step exchanges.

    What the ranks exchange in the forward pass (`hvd.SyncBatchNorm`, a rank's own collectives) waits for the
    rank that has left the pass. An allocation that fails in `optimizer.step()` itself, when other ranks
    already update, is raised as ever.

    Args:
        optimizer: an `hvd.DistributedOptimizer` without overlap_forward, deadline, staleness, op=Adasum,
            shard, or a compression that keeps what it leaves out.

    Attributes:
        skipped: whether the batch was skipped; the same on all ranks.

    Raises:
        ValueError: another optimizer.
        BatchSkippedError: in a step outside of this context, if another rank was inside.

    Example:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for inputs, targets in loader:
            with hvd.skip_if_out_of_memory(optimizer):
                optimizer.zero_grad()
                loss_of(model, inputs, targets).backward()
                optimizer.step()
    """

    def __init__(self, optimizer: Any) -> None:
        if not _can_skip(optimizer):
            raise ValueError(
                "skip_if_out_of_memory needs an optimizer that hvd.DistributedOptimizer has made without "
                "overlap_forward, deadline, staleness, op=hvd.Adasum, shard, or Compression.powersgd, "
                "topk, onebit, int8 or fp8: these keep parts of a batch for later steps, or use it early"
            )
        self._optimizer = optimizer
        self.skipped = False

    def __enter__(self) -> skip_if_out_of_memory:
        self.skipped = False
        self._steps = self._optimizer._reducer.progress[0]
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, BatchSkippedError):
            if error is None or not _is_out_of_memory(error):
                return False
            reducer = self._optimizer._reducer
            if reducer.progress != (self._steps, False):
                hint(_LATE)
                return False
            place, text = location_of(trace), str(error).partition("\n")[0]
            traceback.clear_frames(trace)  # what the forward pass has made
            reducer.skip_round()
            context = self._optimizer._scope.context
            hint(f"rank {context.rank} ran out of memory {place}, so all ranks skip this batch: {text}")
        self.skipped = True
        self._optimizer.zero_grad()
        return True


def _can_skip(optimizer: Any) -> bool:
    """Returns whether nothing of a batch is used, or kept, before its round has ended."""
    return (
        isinstance(optimizer, _Distributed)
        and not isinstance(optimizer, Sharded | Overlapped | Timely)
        and optimizer._exchange_options.memory is None
    )


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, HorovodInternalError):
        return False
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _OF_THE_CPU)
