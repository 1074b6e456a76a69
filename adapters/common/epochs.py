"""The epochs from which ranks read their data: in different epochs their samples overlap."""

from __future__ import annotations

from typing import NamedTuple

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


def checksum_of_epoch(epoch: Epoch | None) -> int:
    """Returns a checksum; 0 for a rank that has read no such data."""
    return 0 if epoch is None else checksum_of_text(str(epoch))


def difference_of_epochs(scope: Scope, own: Epoch | None) -> str:
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
