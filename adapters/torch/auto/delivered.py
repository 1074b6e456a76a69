"""The tensors that a training loop is given: some rows of a batch, which every rank has read as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from sirtaki.torch.auto.job import LoadedBatch
from sirtaki.torch.auto.marks import Mark, mark_of, put, unmark


def mark_rows(batch: LoadedBatch) -> Callable[[Tensor, Tensor], None]:
    """Returns a function that marks a tensor of this rank's rows, and keeps the one with all rows."""

    def mark(tensor: Tensor, whole: Tensor) -> None:
        new = Mark(batch, "the batch")
        new.whole, new.version = whole, whole._version
        put(tensor, new)
        batch.delivered.append((weakref.ref(tensor), new))

    return mark


def give_all_rows(batch: LoadedBatch) -> None:
    """Gives the tensors of the last batch of a loop all rows, unless the loop has changed them.

    The code that follows a loop may use them. Those of other batches stay as they are, because a loss that
    is differentiated in a later batch may have been computed from them.
    """
    for reference, mark in batch.delivered:
        tensor, whole = reference(), mark.whole
        if tensor is None or mark_of(tensor) is not mark or not mark.is_delivered or tensor.requires_grad:
            continue
        unmark(tensor)
        if batch.is_part and whole is not None:
            with torch.no_grad():
                tensor.set_(whole)  # type: ignore[call-overload]
    batch.delivered.clear()
