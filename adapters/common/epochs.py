"""The epochs from which ranks read their data: in different epochs their samples overlap."""

from __future__ import annotations

import threading
from typing import NamedTuple

from sirtaki.bindings.context import Context
from sirtaki.common.checksums import checksum_of_text
from sirtaki.common.consistency import Scope
from sirtaki.common.objects import gather_objects

_ADVICE = (
    "together they read some samples twice and others not at all. Each iteration over an hvd.DataLoader "
    "begins its next epoch, also one that is left after the first batch: iterate on all ranks or on none, or "
    "call loader.set_epoch(epoch) before each epoch; data that one rank reads alone need torch's DataLoader"
)


class Epoch(NamedTuple):
    """An epoch of shuffled data; equal ones have the same order.

    Attributes:
        number: the epoch's number, from 0.
        seed: determines the order, together with the number.
        samples: the number of samples of all ranks.
    """

    number: int
    seed: int
    samples: int

    def __str__(self) -> str:
        return f"epoch {self.number} of {self.samples} samples (seed {self.seed})"


def note_batch(context: Context, epoch: Epoch) -> None:
    """Records that this thread has read a batch of an epoch."""
    thread = threading.get_ident()
    _, count = context.epochs.get(thread, (None, 0))
    context.epochs[thread] = (epoch, count + 1)


class EpochCheck:
    """The epochs of the batches that ranks read before the rounds of an optimizer.

    A rank may read other data than it trains on, to show a sample or to evaluate. An epoch is therefore
    known only in a round before which this thread has read a batch, and ranks are taken to train on
    different epochs only if two rounds in succession find the same ones.

    Attributes:
        checksum: that of this rank's epoch in this round; None if it is unknown.
        has_difference: whether ranks train on different epochs, which has not been reported yet.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._thread = threading.get_ident()  # a thread that reads data ahead is in any epoch
        self._count = 0  # of the batches that the thread had read at the last round
        self._epoch: Epoch | None = None  # the last that was known, and its checksum
        self._epoch_checksum = 0
        self._suspected: tuple[int, int] | None = None  # different epochs of the last round with known ones
        self._found: Epoch | None = None  # this rank's epoch in the round that has found a difference
        self.checksum: int | None = None
        self.has_difference = False

    def begin_round(self) -> bool:
        """Returns whether the ranks have to compare their epochs in this round."""
        epoch, count = self._scope.context.epochs.get(self._thread, (None, 0))
        if count == self._count:
            self.checksum = None
            return False
        self._count = count
        is_new = epoch != self._epoch or self._suspected is not None
        if epoch != self._epoch:
            self._epoch, self._epoch_checksum = epoch, checksum_of_text(str(epoch))
        self.checksum = self._epoch_checksum
        return is_new

    def finish(self, least: int, most: int) -> None:
        """Takes the extremes of the checksums of all ranks that know theirs; all ranks get the same."""
        if least > most:  # no rank knows its epoch
            return
        suspected, self._suspected = self._suspected, None
        if least == most:
            return
        if suspected == (least, most):
            self.has_difference = True
            self._found = None if self.checksum is None else self._epoch
        else:
            self._suspected = least, most

    def difference(self) -> str:
        """Describes the difference that has been found. All ranks must call it."""
        self.has_difference = False
        return _difference(self._scope, self._found)


def _difference(scope: Scope, own: Epoch | None) -> str:
    """Names two ranks in different epochs; returns an empty text if there are none. All ranks must call it.

    A rank that has read no such data is in no epoch.
    """
    mine = (scope.context.rank, own)
    reports: list[tuple[int, Epoch | None]] = gather_objects(
        scope.context, mine, f"{scope.name}.epochs", scope.process_set
    )
    found = [(rank, epoch) for rank, epoch in reports if epoch is not None]
    for rank, epoch in found:
        first, base = found[0]
        if epoch != base:
            return (
                f"ranks train on different epochs of their data: {scope.label(first)} on {base}, and "
                f"{scope.label(rank)} on {epoch}, so {_ADVICE}"
            )
    return ""
