"""The rows of a logical batch that a rank computes, and their weight in the results of all ranks.

`common.training.one_batch` splits the batch; optimizers ask here for the factor of this rank's gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import fixed_divisor


@dataclass(frozen=True)
class Share:
    """A rank's part of a batch: consecutive rows, in the order of ranks; the first ranks may have 1 row more.

    Attributes:
        context: the rank.
        total: the number of rows of the whole batch.
    """

    context: Context
    total: int

    @property
    def rows(self) -> slice:
        least, more = divmod(self.total, self.context.size)
        start = self.context.rank * least + min(self.context.rank, more)
        return slice(start, start + least + (self.context.rank < more))

    @property
    def count(self) -> int:
        """Returns the number of this rank's rows, which may be 0."""
        return self.rows.stop - self.rows.start

    @property
    def counts(self) -> list[int]:
        """Returns the number of rows of each rank."""
        least, more = divmod(self.total, self.context.size)
        return [least + (rank < more) for rank in range(self.context.size)]

    @property
    def is_even(self) -> bool:
        """Returns whether all ranks have equally many rows."""
        return self.total % self.context.size == 0

    @property
    def weight(self) -> float:
        """Returns this rank's part of a mean over all rows."""
        return self.count / self.total

    def gradient_factor(self, op: int) -> float:
        """Returns the factor of this rank's gradients before `op` combines them over the ranks.

        It makes an average over ranks one over rows; 0 without rows, as a mean over no rows is no number.
        """
        if op == core.AVERAGE:
            return self.count * (fixed_divisor(self.context) or self.context.size) / self.total
        return float(self.count > 0) if op == core.SUM else 1.0

    @property
    def facts(self) -> tuple[int, int, int, int] | None:
        """Returns what determines this rank's factors; None if gradients count as outside of such a step."""
        divisor = None if self.context.is_provisional else fixed_divisor(self.context)
        divisor = divisor or self.context.size
        if self.is_even and divisor == self.context.size:
            return None
        return self.count, self.total, self.context.size, divisor

    def check_gradients(self, op: int, process_set: ProcessSet) -> None:
        """Raises ValueError unless gradients are averaged or summed over all ranks."""
        if op not in (core.AVERAGE, core.SUM) or process_set is not global_process_set:
            raise ValueError(
                "inside @hvd.consistent gradients are combined over all ranks, by op=hvd.Average for a loss "
                "that is a mean over rows, or by op=hvd.Sum for one that is a sum over rows: with another "
                "op, or with a process set, the result is not that of one device"
            )


_share: ContextVar[Share | None] = ContextVar("sirtaki_share", default=None)


def current_share() -> Share | None:
    """Returns the share of the step that the calling code is part of; None outside of such steps."""
    return _share.get()


def make_current(share: Share | None) -> None:
    """Makes a share current for the code that follows, where no context manager can see its end."""
    _share.set(share)


@contextmanager
def using(share: Share) -> Iterator[None]:
    """Makes a share current inside."""
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


def refuse_derivative() -> None:
    """Raises UnsupportedError where the derivative of an operation between ranks would not be weighted.

    Ranks count by their rows once gradients are complete. A derivative that adds gradients of several ranks
    before that adds losses that count differently.
    """
    share = _share.get()
    if share is not None and not share.is_even:
        raise UnsupportedError(
            f"this step of @hvd.consistent has {share.total} rows for {share.context.size} ranks, and "
            "differentiates an operation between ranks (hvd.SyncBatchNorm has two), which is exact only if "
            "all ranks have equally many rows: make the rows of a batch a multiple of hvd.size(), for "
            "example with drop_last=True"
        )
