"""The context of a worker that is not a rank yet: it has a rank and a size, but nobody to talk to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

from sirtaki.bindings.bootstrap.identity import describe_process, topology_of
from sirtaki.bindings.config import Config
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import NotInitializedError
from sirtaki.bindings.observing import user_code
from sirtaki.bindings.request import Batch
from sirtaki.bindings.survivors import Survivors
from sirtaki.bindings.topology import RankPlacement


class ProvisionalContext(Context):
    """The context between `hvd.init()` and `hvd.elastic.run`; operations raise.

    Its rank and size are those with which hvdrun has started the worker. They serve to make optimizers and
    samplers, which move to the first world when it exists.
    """

    is_provisional = True

    def __init__(self, placement: RankPlacement, config: Config, survivors: Survivors) -> None:
        alone = topology_of(0, [describe_process("", {})])
        super().__init__(alone, config)
        self.start()
        self.topology = replace(
            alone,
            rank=placement.rank,
            size=placement.size,
            local_rank=placement.local_rank,
            local_size=placement.local_size,
            cross_rank=placement.cross_rank,
            cross_size=placement.cross_size,
            peers=[alone.peers[0]] * placement.size,
        )
        self.rank, self.size = placement.rank, placement.size
        self.survivors = survivors

    def enqueue(self, batch: Batch, start: int = 0, count: int | None = None) -> None:
        self._refuse()

    def run(self, batch: Batch) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotInitializedError(
            f"rank {self.rank} exchanges data outside of hvd.elastic.run{_place()}: in a job with --min-np, "
            "ranks exist only inside the function that @hvd.elastic.run decorates. Move this call into it; "
            "the state is sent to all ranks before it starts"
        )


@contextmanager
def closed(context: Context, why: str) -> Iterator[None]:
    """Refuses all exchanges inside, with this reason: other ranks would not take part."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotInitializedError(f"rank {context.rank} exchanges data{_place()}, but {why}")

    context.clear_process_context()
    context.enqueue = context.run = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del context.enqueue, context.run
        context.set_process_context()


def _place() -> str:
    """Returns the user's innermost line, in parentheses; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and user_code.is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return f" ({user_code.CallSite(frame.f_code, frame.f_lasti)})" if frame is not None else ""
