"""Assigns samples to ranks, in an epoch that may begin and end with different numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from sirtaki.bindings.default_context import current
from sirtaki.torch.collectives import allgather


class ElasticSampler(Sampler[int]):
    """A sampler that distributes the unprocessed samples of an epoch over the current ranks.

    It is used like `DistributedSampler`, and in addition records the processed samples. After `reset()` or
    `load_state_dict()`, with more ranks or fewer, the rest of the epoch is redistributed: no sample is
    repeated, and none is left out. Ranks get equally many, so that all take the same number of steps: if the
    samples do not divide evenly, some are repeated.

    Args:
        dataset: any object with a length, the same on all ranks.
        shuffle: whether each epoch has a different order.
        seed: determines the orders, together with the epoch; the same on all ranks.

    Raises:
        NotInitializedError: init() has not been called.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._processed = torch.zeros(len(dataset), dtype=torch.bool)
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch, with no sample processed. All ranks must call it."""
        self.epoch = epoch
        self._processed.zero_()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that every rank has processed its batch number `batch_idx` of the current distribution.

        All ranks must call it, with batches of one size (the last may be smaller).
        """
        self._processed[self._dealt[:, batch_idx * batch_size :][:, :batch_size]] = True

    def record_indices(self, indices: Iterable[int]) -> None:
        """Records that this rank has processed these samples. `merge()` sends this to the others."""
        self._processed[torch.as_tensor(list(indices), dtype=torch.int64)] = True

    def merge(self) -> None:
        """Exchanges the records of all ranks. All ranks must call it.

        Raises:
            PeerLostError: a rank died.
        """
        mine = self._processed.nonzero().flatten()
        self._processed[allgather(mine)] = True

    @property
    def processed_indices(self) -> set[int]:
        """Returns the samples of this epoch that are known to have been processed."""
        return set(self._processed.nonzero().flatten().tolist())

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and which of its samples have been processed (one bool per sample)."""
        return {"epoch": self.epoch, "processed": self._processed.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where another sampler was, on the current number of ranks.

        All ranks must call it, with equal state.

        Raises:
            ValueError: the state belongs to a sampler over a dataset of another length.
        """
        processed = state_dict["processed"]
        if processed.shape != self._processed.shape:
            raise ValueError(
                f"the sampler's state is that of a dataset of {len(processed)} samples, but this one has "
                f"{len(self._processed)}"
            )
        self.epoch = state_dict["epoch"]
        self._processed.copy_(processed)
        self.reset()

    def reset(self) -> None:
        """Distributes the unprocessed samples over the current ranks. All ranks must call it."""
        context = current()
        order = torch.arange(len(self._processed))
        if self.shuffle:
            source = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=source)
        rest = order[~self._processed[order]]
        share = -(-len(rest) // context.size)
        again = torch.arange(share * context.size) % max(len(rest), 1)
        self._rank = context.rank
        self._dealt = rest[again].view(share, context.size).t()  # one row per rank

    def __iter__(self) -> Iterator[int]:
        return iter(self._dealt[self._rank].tolist())

    def __len__(self) -> int:
        return self._dealt.shape[1]
