"""Assigns samples to ranks, in an epoch that may begin and end with different numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from sirtaki.bindings.context import Context, current
from sirtaki.common.semantics import hint
from sirtaki.torch.ops.collectives import allgather
from sirtaki.torch.training.wrapping import TorchSurvivor


@dataclass
class _Deal:
    """A distribution of an epoch's remaining samples over the ranks, and a record of the processed samples.

    Samples are dealt one by one, in turn: sample number p goes to rank p % size. At the end of the epoch the
    first samples are dealt again, so that ranks get equally many.

    Attributes:
        size: the number of ranks.
        done: what every rank has processed of its share, as disjoint intervals of positions, ascending.
        samples: indices of samples that were recorded one by one.
        unmerged: those of them that other ranks may not know of.
    """

    size: int
    done: list[tuple[int, int]] = field(default_factory=list)
    samples: set[int] = field(default_factory=set)
    unmerged: set[int] = field(default_factory=set)

    def share(self, count: int) -> int:
        """Returns how many of `count` samples each rank gets."""
        return -(-count // self.size)

    def part_of(self, rank: int, remaining: Tensor) -> Tensor:
        """Returns a rank's share of these samples."""
        turns = torch.arange(self.share(len(remaining))) * self.size + rank
        return remaining[turns % max(len(remaining), 1)]

    def record(self, start: int, end: int) -> None:
        """Records that each rank has processed positions `start` to `end` of its share."""
        if start >= end:
            return
        joined = [pair for pair in self.done if pair[0] <= end and start <= pair[1]]
        apart = [pair for pair in self.done if pair not in joined]
        whole = (min([start, *(pair[0] for pair in joined)]), max([end, *(pair[1] for pair in joined)]))
        self.done = sorted([*apart, whole])

    def record_samples(self, samples: set[int]) -> None:
        """Records samples that this rank has processed."""
        self.unmerged |= samples - self.samples
        self.samples |= samples

    def known_to_all(self) -> _Deal:
        """Returns the part of the account that is equal on all ranks."""
        return _Deal(self.size, self.done, self.samples - self.unmerged)

    def processed(self, remaining: Tensor) -> Tensor:
        """Returns which of these samples have been processed, as a bool per sample."""
        processed = torch.zeros(len(remaining), dtype=torch.bool)
        for start, end in self.done:
            processed[start * self.size : end * self.size] = True
            processed[: max(end * self.size - len(remaining), 0)] = True  # dealt again, to fill the shares
        if self.samples:
            processed |= torch.isin(remaining, torch.tensor(sorted(self.samples)))
        return processed


class ElasticSampler(TorchSurvivor, Sampler[int]):
    """A sampler that distributes the unprocessed samples of an epoch over the current ranks.

    It is used like `DistributedSampler`, and in addition records the processed samples. When the number of
    ranks changes, the rest of the epoch is distributed anew: no sample is repeated, and none is left out.
    Ranks get equally many, so that all take the same number of steps: if the samples do not divide evenly,
    up to size - 1 are repeated at the end of the epoch.

    An iteration after one whose samples were all recorded begins another epoch, with no sample processed.
    Less than a batch that is left (`drop_last`) counts as recorded. Without `set_epoch`, that epoch has the
    same number, hence the same order, which a hint says once.

    In an elastic job, give it to the state (`TorchState(model, optimizer, sampler=sampler)`): the account of
    the processed samples then belongs to each commit. It takes the same time for every length of the data
    set. Without `hvd.elastic.run`, call `reset()` or `load_state_dict()` after a change.

    Args:
        dataset: any object with a length, the same on all ranks.
        shuffle: whether each epoch has a different order.
        seed: determines the orders, together with the epoch; the same on all ranks.

    Raises:
        NotInitializedError: init() has not been called; or, when it is used, it was made inside a training
            function of `hvd.elastic.run` by an execution that has ended.

    Example:
        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler)
        for batch, (inputs, targets) in enumerate(loader):  # in the training function
            sampler.record_batch(batch, batch_size=4)  # after the step
            state.commit()
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._length = len(dataset)
        self._batch_size = 0  # the largest that was recorded
        self._has_iterated = False  # in the current deal
        self._has_hinted = False
        self._is_saved = False  # whether a state has asked for this one's
        context = current()
        self._rank, self._size = context.rank, context.size
        self._begin_epoch([])
        self._register(context)

    def set_epoch(self, epoch: int) -> None:
        """Starts another epoch, with no sample processed. All ranks must call it.

        The epoch that is in progress goes on: a training function that begins again within an epoch may call
        this first.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin_epoch([])

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that every rank has processed its batch number `batch_idx` of the current distribution.

        All ranks must call it, with batches of one size (the last may be smaller).
        """
        self._batch_size = max(self._batch_size, batch_size)
        start = batch_idx * batch_size
        self._deal.record(start, min(start + batch_size, len(self)))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Records that this rank has processed these samples. `merge()` sends the record to the other ranks.

        A commit then takes time in proportion to the samples that were recorded in this way.
        """
        self._deal.record_samples({int(index) for index in indices})

    def merge(self) -> None:
        """Exchanges what the ranks have recorded with `record_indices`. All ranks must call it.

        Raises:
            PeerLostError: a rank died.
        """
        mine = torch.tensor(sorted(self._deal.samples), dtype=torch.int64)
        self._deal.samples.update(allgather(mine).tolist())
        self._deal.unmerged.clear()

    @property
    def processed_indices(self) -> set[int]:
        """Returns the samples of this epoch that are known to have been processed."""
        remaining = set(self._after_deal().tolist())
        return set(range(self._length)) - remaining

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and how far it has come.

        The keys: "epoch"; "length", that of the data set; "batch_size", the largest that was recorded;
        "deals", which has for each number of ranks on which the epoch has run: that number, the processed
        intervals of each rank's share as pairs (start, end), and the samples that were recorded one by one.
        """
        self._is_saved = True
        deals = [*self._past, self._deal]
        return {
            "epoch": self.epoch,
            "length": self._length,
            "batch_size": self._batch_size,
            "deals": [
                (deal.size, list(deal.done), sorted(deal.samples))
                for deal in deals
                if deal.done or deal.samples
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where another sampler was, on the current number of ranks.

        All ranks must call it, with equal state.

        Raises:
            ValueError: the state belongs to a sampler over a dataset of another length.
        """
        self._take_account(state_dict)
        self.reset()

    def reset(self) -> None:
        """Distributes the unprocessed samples over the current ranks. All ranks must call it."""
        self._check_use()
        context = current()
        self._deal_to(context.rank, context.size)

    def move_to(self, context: Context) -> None:
        """Distributes the unprocessed samples over the ranks of another world. `hvd.elastic.run` calls it."""
        self._deal_to(context.rank, context.size)

    def __iter__(self) -> Iterator[int]:
        self._check_use()
        if self._has_iterated and self._is_over():
            self._begin_again()
        self._has_iterated = True
        return iter(self._deal.part_of(self._rank, self._remaining).tolist())

    def __len__(self) -> int:
        return self._deal.share(len(self._remaining))

    @property
    def is_unsaved(self) -> bool:
        """Returns whether samples have been recorded that no state knows of."""
        return not self._is_saved and bool(self._past or self._deal.done or self._deal.samples)

    # ---- The account -----------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """Returns whether less than a batch is left of the epoch. The answer is the same on all ranks."""
        left = self._remaining[~self._deal.known_to_all().processed(self._remaining)]
        return self._length > 0 and self._deal.share(len(left)) < max(self._batch_size, 1)

    def _begin_again(self) -> None:
        """Begins another epoch with the order of the last, for a program that does not call `set_epoch`."""
        if self.shuffle and self._rank == 0 and not self._has_hinted:
            self._has_hinted = True
            hint(
                "another epoch begins in the same order as the last: call sampler.set_epoch(epoch) before "
                "each epoch"
            )
        self._begin_epoch([])

    def _begin_epoch(self, past: list[_Deal]) -> None:
        """Begins the current epoch behind these deals."""
        order = torch.arange(self._length)
        if self.shuffle:
            source = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._length, generator=source)
        for deal in past:
            order = order[~deal.processed(order)]
        self._past = past
        self._remaining = order  # the samples of the current deal, in the order in which they are dealt
        self._deal = _Deal(self._size)
        self._has_iterated = False

    def _take_account(self, state_dict: dict[str, Any]) -> None:
        """Continues where another sampler was, on the previous number of ranks.

        Needs no world: the one in which the sampler was used may have ended.
        """
        if state_dict["length"] != self._length:
            raise ValueError(
                f"the sampler's state is that of a dataset of {state_dict['length']} samples, but this one "
                f"has {self._length}"
            )
        self.epoch = state_dict["epoch"]
        self._batch_size = state_dict.get("batch_size", 0)
        deals = state_dict["deals"]
        self._begin_epoch(
            [
                _Deal(size, [(start, end) for start, end in done], set(samples))
                for size, done, samples in deals
            ]
        )

    def _deal_to(self, rank: int, size: int) -> None:
        """Distributes the unprocessed samples over `size` ranks, of which this is number `rank`."""
        self._remaining = self._after_deal()
        if self._deal.done or self._deal.samples:
            self._past.append(self._deal)
        self._rank, self._size, self._deal = rank, size, _Deal(size)
        self._has_iterated = False  # what was interrupted behind its last sample is not repeated

    def _after_deal(self) -> Tensor:
        return self._remaining[~self._deal.processed(self._remaining)]
