"""The data sets and epochs from which ranks read: if these differ, the samples of ranks overlap."""

from __future__ import annotations

import threading
from typing import NamedTuple

from sirtaki.bindings.context import Context
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.training.consistency import Scope, checksum_of_text

_ADVICE = (
    "together they read some samples twice and others not at all. Each iteration over an hvd.DataLoader "
    "begins its next epoch, also one that is left after the first batch: iterate on all ranks or on none, or "
    "call loader.set_epoch(epoch) before each epoch; call loader.load_state_dict(state) on all ranks, with "
    "the same state; data that one rank reads alone need torch's DataLoader"
)


_DATA_ADVICE = (
    "sirtaki divides one data set that is the same on all ranks. Give random_split, or what else chooses or "
    "shuffles samples, the same seed on all ranks: "
    "random_split(data, lengths, generator=torch.Generator().manual_seed(0)). A rank that has loaded no more "
    "than its own part needs torch's DataLoader"
)


class Epoch(NamedTuple):
    """An epoch of shuffled data; equal epochs have the same order.

    Attributes:
        number: the epoch's number, from 0.
        seed: determines the order, together with the number.
        samples: the number of samples of all ranks.
        data: a checksum of what is cheap to know of the samples, such as the indices of a subset; 0: nothing.
        start: the number of samples, of all ranks, that were read in the epoch before the program started.
    """

    number: int
    seed: int
    samples: int
    data: int = 0
    start: int = 0

    def __str__(self) -> str:
        begin = f", from sample {self.start}" if self.start else ""
        return f"epoch {self.number} of {self.samples} samples (seed {self.seed}{begin})"


class _Report(NamedTuple):
    """The last batch that a rank has read: its epoch, and its index there; None: they are unknown."""

    rank: int
    epoch: Epoch | None
    batch: int


def note_batch(context: Context, epoch: Epoch, index: int) -> None:
    """Records that this thread has read the batch of an epoch with this index, from 0."""
    thread = threading.get_ident()
    _, _, count = context.epochs.get(thread, (None, 0, 0))
    context.epochs[thread] = (epoch, index, count + 1)


class EpochCheck:
    """The epochs of the batches that ranks read before the rounds of an optimizer.

    A rank may read other data than it trains on, to show a sample or to evaluate. An epoch is therefore
    known only in a round before which this thread has read a batch, and ranks are taken to train on
    different epochs only if two rounds in succession find the same ones.

    Ranks may also skip batches of their own, and be at the end of an epoch while others begin the next, or
    take turns of their own between data sets. Only epochs of equally many samples are compared, and only
    where the ranks are at the same batch of them: a rank that is an epoch ahead always is.

    Attributes:
        checksum: that of this rank's epoch in this round; None if it is unknown.
        has_difference: whether ranks train on different epochs, which has not been reported yet.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._thread = threading.get_ident()  # a thread that reads data ahead is in any epoch
        self._count = 0  # of the batches that the thread had read at the last round
        self._epoch: Epoch | None = None  # the last that was known, the index of its batch, and its checksum
        self._index = 0
        self._epoch_checksum = 0
        self._suspected: tuple[int, int] | None = None  # different epochs of the last round with known ones
        self._found = _Report(scope.context.rank, None, 0)  # of the round that has found a difference
        self._is_over = False
        self.checksum: int | None = None
        self.has_difference = False

    def begin_round(self) -> bool:
        """Returns whether the ranks have to compare their epochs in this round."""
        epoch, self._index, count = self._scope.context.epochs.get(self._thread, (None, 0, 0))
        if count == self._count or self._is_over:
            self.checksum = None
            return False
        self._count = count
        is_new = epoch != self._epoch or self._suspected is not None
        if epoch != self._epoch:
            self._epoch, self._epoch_checksum = epoch, checksum_of_text(repr(epoch))
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
            epoch = None if self.checksum is None else self._epoch
            self._found = _Report(self._scope.context.rank, epoch, self._index)
        else:
            self._suspected = least, most

    def stop(self) -> None:
        """Ends the comparisons, on all ranks: a difference has been reported, and the program continues."""
        self._is_over, self._suspected = True, None

    def difference(self) -> str:
        """Describes the difference that has been found; an empty text if it is none. All ranks call it."""
        self.has_difference = False
        return _difference(self._scope, self._found)


def _difference(scope: Scope, own: _Report) -> str:
    """Names two ranks in different epochs; returns an empty text if there are none. All ranks call it."""
    reports: list[_Report] = gather_objects(scope.context, own, f"{scope.name}.epochs", scope.process_set)
    # By the samples of the epoch, and the index of the batch.
    firsts: dict[tuple[int, int], tuple[int, Epoch]] = {}
    for rank, epoch, batch in reports:
        if epoch is None:
            continue
        first_rank, first = firsts.setdefault((epoch.samples, batch), (rank, epoch))
        item, other = scope.label(first_rank), scope.label(rank)
        if epoch.data != first.data:
            return (
                f"ranks have different data sets of {epoch.samples} samples: {item} and {other} have other "
                "samples, or other labels, under the same numbers, so together they read some samples twice "
                f"and others, such as those kept for validation, although they should not. {_DATA_ADVICE}"
            )
        if epoch != first:
            return (
                f"ranks train on different epochs of their data: {item} on {first}, and {other} on {epoch}, "
                f"so {_ADVICE}"
            )
    return ""
