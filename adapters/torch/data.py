"""Each rank's part of a data set, without rank numbers in the program."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import current, find
from sirtaki.common.epochs import Epoch, note_batch
from sirtaki.common.hints import hint
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.training.checksums import checksum_of_text, combined
from sirtaki.torch.consistency import checksum_of
from sirtaki.torch.training.wrapping import TorchSurvivor

_SAMPLED_BYTES = 1 << 20


class DistributedSampler(TorchSurvivor, TorchSampler[Any]):
    """torch's DistributedSampler, with this rank and the number of ranks filled in.

    Each rank gets different samples, and all get equally many: if the samples do not divide evenly, some are
    repeated in an epoch, or, with `drop_last`, left out. For evaluation, `pad=False` gives each sample to
    exactly one rank; ranks then differ by up to one sample, and may differ by a batch. Call
    `set_epoch(epoch)` before each epoch, or all epochs have the same order.

    In an elastic job it follows the number of ranks, but an epoch that is in progress when they change begins
    again: `hvd.elastic.ElasticSampler` distributes the rest of the epoch instead.

    Args:
        dataset: any object with a length, the same on all ranks.
        num_replicas, rank: replacements for the number of ranks and this rank's number.
        shuffle: whether each epoch has a different order.
        seed: determines the orders, together with the epoch; the same on all ranks.
        drop_last: leave out samples that do not divide evenly, instead of repeating some.
        process_set: the ranks that share the data; this rank has to be one of them.
        pad: repeat samples that do not divide evenly; False: neither repeat nor leave out any.

    Raises:
        NotInitializedError: init() has not been called; or, when it is used, it was made inside a training
            function of `hvd.elastic.run` by an execution that has ended.
        ValueError: this rank does not belong to the set; `pad=False` with `drop_last`; in an elastic job, a
            number of ranks, a rank or a process set that is fixed.

    Example:
        loader = DataLoader(test_set, batch_size=64, sampler=hvd.DistributedSampler(test_set, pad=False))
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        process_set: ProcessSet = global_process_set,
        pad: bool = True,
    ) -> None:
        context = current()
        if drop_last and not pad:
            raise ValueError("pad=False leaves out no samples, and drop_last=True does: give one of them")
        if context.survivors is not None:
            _check_follows_changes(num_replicas, rank, process_set)
        count, index = _count_and_index(context, process_set)
        super().__init__(
            dataset,
            count if num_replicas is None else num_replicas,
            index if rank is None else rank,
            shuffle,
            seed,
            drop_last,
        )
        self._pads = pad
        self._has_iterated = self._has_epoch = False
        self._first_epoch = self._next_epoch = 0  # of the DataLoader that has made it
        self._register(context)

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch, which determines its order."""
        self._has_epoch = True
        super().set_epoch(epoch)

    def move_to(self, context: Context) -> None:
        """Distributes the next epoch over the ranks of another world. `hvd.elastic.run` calls it.

        A DataLoader counts from its first epoch again, as it does on ranks that have joined.
        """
        self._next_epoch = self._first_epoch
        again: TorchSampler[Any] = TorchSampler(
            self.dataset, context.size, context.rank, drop_last=self.drop_last
        )
        self.num_replicas, self.rank = again.num_replicas, again.rank
        self.num_samples, self.total_size = again.num_samples, again.total_size

    def __iter__(self) -> Iterator[Any]:
        self._check_use()
        if self._has_iterated and self.shuffle and not self._has_epoch:
            self._has_epoch = True  # report this only once
            if self.rank == 0:
                hint(
                    "a second epoch begins in the same order as the first: call sampler.set_epoch(epoch) "
                    "before each epoch, or use hvd.DataLoader, which does"
                )
        self._has_iterated = True
        return islice(super().__iter__(), len(self))  # torch repeats samples at the end of the order

    def __len__(self) -> int:
        """Returns the number of this rank's samples."""
        if self._pads:
            return super().__len__()
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


class DataLoader(data.DataLoader[Any]):
    """torch's DataLoader for this rank's samples: `batch_size` counts samples per rank.

    All ranks have the same number of batches, unless `pad` is off. Each epoch has a different order, if
    `shuffle` is on; `set_epoch` sets the epoch to continue with after a restart. Each iteration begins the
    next epoch, so iterate on all ranks or on none: a DistributedOptimizer raises ValueError if the last
    batches that ranks have read are of different epochs, the same ones before two steps in succession, and
    have the same index; or of subsets with other indices, as `random_split` without a seed makes them, or
    with other integers in them.

    Args:
        dataset: as for `DistributedSampler`.
        batch_size: samples in a batch of one rank.
        shuffle, seed: as for `DistributedSampler`.
        drop_last: leave out samples that do not divide evenly, and a last batch that is not full.
        process_set: the ranks that share the data; this rank has to be one of them.
        pad: as for `DistributedSampler`.
        options: all other options of torch's DataLoader.

    Raises:
        NotInitializedError: init() has not been called.
        ValueError: a custom sampler, or an IterableDataset, which no sampler can divide; `pad=False` with
            `drop_last`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        drop_last: bool = False,
        process_set: ProcessSet = global_process_set,
        pad: bool = True,
        **options: Any,
    ) -> None:
        _check_options(dataset, options)
        sampler = DistributedSampler(
            dataset, shuffle=shuffle, seed=seed, drop_last=drop_last, process_set=process_set, pad=pad
        )
        super().__init__(dataset, batch_size, sampler=sampler, drop_last=drop_last, **options)
        self._own = sampler
        self._is_noted = process_set is global_process_set
        self._identity: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch; without it, epochs are counted from 0.

        In an elastic job they are counted again when the ranks change: from the epoch that was set before
        `hvd.elastic.run`, as on ranks that join.
        """
        self._own._next_epoch = epoch
        context = find()
        if context is None or context.survivors is None or not context.survivors.has_begun:
            self._own._first_epoch = epoch

    def __iter__(self) -> Any:
        sampler, context = self._own, find()
        is_noted = self._is_noted and context is not None and context.size > 1
        if is_noted and self._identity is None:
            self._identity = _identity_of(sampler.dataset)
        number, seed = (sampler._next_epoch, sampler.seed) if sampler.shuffle else (0, 0)  # equal orders
        epoch = Epoch(number, seed, len(sampler.dataset), self._identity or 0)  # type: ignore[arg-type]
        sampler.set_epoch(sampler._next_epoch)
        sampler._next_epoch += 1
        batches = super().__iter__()
        if not (sampler.shuffle or (is_noted and epoch.data)):
            return batches
        return _EpochBatches(batches, epoch, sampler, context if is_noted else None)


class _EpochBatches:
    """The batches of an epoch, in its order even if another iteration has begun before the first batch.

    It notes the epoch for the checks of the steps that follow, in the world of a context.
    """

    def __init__(
        self, batches: Any, epoch: Epoch, sampler: DistributedSampler, context: Context | None
    ) -> None:
        self._batches, self._epoch, self._context = batches, epoch, context
        self._sampler = sampler
        self._index = -1  # of the last batch

    def __iter__(self) -> _EpochBatches:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        if self._index < 0:  # without worker processes, torch asks the sampler for the order now
            self._sampler.set_epoch(self._epoch.number)
        batch = next(self._batches)
        self._index += 1
        if self._context is not None:
            note_batch(self._context, self._epoch, self._index)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _identity_of(dataset: Any) -> int:
    """Returns a checksum of what is cheap to know of a data set; 0 if that is nothing.

    Of tensors only integers count: ranks may have computed their floats differently.
    """
    if isinstance(dataset, Subset):
        return combined([_identity_of(dataset.dataset), checksum_of_text(repr(list(dataset.indices)))])
    if isinstance(dataset, ConcatDataset):
        parts = [_identity_of(part) for part in dataset.datasets]
        return combined(parts) if any(parts) else 0
    if not isinstance(dataset, TensorDataset):
        return 0
    exact = [
        tensor for tensor in dataset.tensors if not tensor.is_floating_point() and not tensor.is_complex()
    ]
    sums = [checksum_of(_sample_of(tensor)) for tensor in exact if tensor.device.type == "cpu"]
    return combined(sums) if sums else 0


def _sample_of(rows: torch.Tensor) -> torch.Tensor:
    """Returns evenly spaced rows of a tensor, about a MiB of them at most."""
    size = rows.numel() * rows.element_size()
    return rows[:: max(1, size // _SAMPLED_BYTES)].contiguous() if rows.dim() else rows


def _check_follows_changes(num_replicas: int | None, rank: int | None, process_set: ProcessSet) -> None:
    """Raises ValueError for ranks that would not follow the changes of an elastic job."""
    if num_replicas is not None or rank is not None or process_set is not global_process_set:
        raise ValueError(
            "in an elastic job the ranks change, so a sampler cannot be given num_replicas, rank or a "
            "process set: leave them out, or use hvd.elastic.ElasticSampler"
        )


def _count_and_index(context: Context, process_set: ProcessSet) -> tuple[int, int]:
    """Returns the number of ranks in the set, and this rank's index among them."""
    members = process_set.members(context)
    if context.rank not in members:
        raise ValueError(
            f"rank {context.rank} does not belong to {process_set}, so it has no part of the data"
        )
    return len(members), members.index(context.rank)


def _check_options(dataset: Any, options: dict[str, Any]) -> None:
    given = sorted({"sampler", "batch_sampler"} & options.keys())
    if given:
        raise ValueError(
            f"hvd.DataLoader makes its own sampler, and was given {' and '.join(given)}; use "
            "torch.utils.data.DataLoader for that, with hvd.DistributedSampler, or each rank gets all data"
        )
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "hvd.DataLoader cannot share out an IterableDataset: let the data set itself take each "
            "hvd.size()-th sample, itertools.islice(samples, hvd.rank(), None, hvd.size()), and use "
            "torch.utils.data.DataLoader"
        )
