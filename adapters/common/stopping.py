"""The early end of a training, of all ranks after the same step: a scheduler wants the machine back."""

from __future__ import annotations

import signal
from functools import cache
from typing import TYPE_CHECKING

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context, current, process
from sirtaki.common.ops.handles import Operation, pooled_batch, run
from sirtaki.common.ops.objects import view_of_bytes
from sirtaki.common.ops.reduction import Call, Reduction, describe

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.termination import StopRequests

__all__ = ["should_stop"]

_CALL = Call("should_stop")
_ANY = Reduction(core.MAX)


def should_stop() -> bool:
    """Returns whether to save and end, because any rank was asked to: the same on all ranks.

    All ranks call it once a step, outside of compiled functions; ranks that have joined need not. It
    exchanges one byte. From the first call on, SIGUSR1 and a first SIGTERM, to a rank or to hvdrun, no longer
    end a rank; a second SIGTERM ends the rank, or the job, at once. Once the answer is True it stays so,
    without an exchange. In an elastic job only SIGUSR1 counts: a rank that gets SIGTERM leaves at the next
    commit.

    Returns:
        Whether any rank has received such a signal since its first call.

    Raises:
        RuntimeError: the first call is not in the main thread, which alone receives signals.
        PeerLostError: a rank died.

    Example:
        for inputs, targets in loader:
            ...  # a training step
            if hvd.should_stop():
                if hvd.rank() == 0:
                    save()
                sys.exit(143)
    """
    context = current()
    if context.is_stopping:
        return True
    requests = _requests()
    if not requests.is_listening:
        _listen(context, requests)
    data = bytearray([requests.is_asked])
    batch, view = pooled_batch(), view_of_bytes(data)
    describe(batch, core.ALLREDUCE, view, view.pointer, _CALL, how=_ANY)
    run(context, Operation(batch, view, lambda *_: None))
    context.is_stopping = bool(data[0])
    return context.is_stopping


@cache
def _requests() -> StopRequests:
    """Returns the requests to stop that this process has received as signals."""
    from sirtaki.bindings.bootstrap.termination import StopRequests  # imported late, as by hvd.init()

    return StopRequests(_has_failed)


def _has_failed() -> bool:
    """Returns whether the world of this process has failed."""
    return process.context is not None and process.context.failure is not None


def _listen(context: Context, requests: StopRequests) -> None:
    from sirtaki.bindings.bootstrap import lifecycle
    from sirtaki.bindings.bootstrap.job import ASK_TO_STOP

    if context.survivors is not None:  # SIGTERM is the elastic job's, and its next world goes on listening
        requests.listen([signal.SIGUSR1])
        return
    requests.listen([signal.SIGTERM, signal.SIGUSR1, ASK_TO_STOP])
    context.shutdown_callbacks.append(requests.end)
    lifecycle.report_can_stop()
