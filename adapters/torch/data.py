"""Each rank's part of a data set, without rank numbers in the program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from sirtaki.bindings.context import Context, current, find
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.semantics import hint
from sirtaki.common.training.consistency import checksum_of_text, combined
from sirtaki.common.training.round_checks import Epoch, note_batch
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
        sampler = hvd.DistributedSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                ...
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
        self._start = 0  # samples of all ranks that the next iteration leaves out, at the epoch's beginning
        self._progress = _Progress()  # of the DataLoader that has made it
        self._register(context)

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch, which determines its order."""
        self._has_epoch = True
        super().set_epoch(epoch)

    def begin(self, epoch: int, start: int) -> None:
        """Makes the next iteration that of an epoch, without its first `start` samples."""
        self._start = start
        self.set_epoch(epoch)

    def move_to(self, context: Context) -> None:
        """Distributes the next epoch over the ranks of another world. `hvd.elastic.run` calls it.

        A DataLoader counts from its first epoch again, as it does on ranks that have joined, unless it
        belongs to an elastic state.
        """
        self._progress.enter_world()
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
        whole: TorchSampler[Any] = TorchSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        order = list(whole)
        rest, end = order[self._start :], self.num_replicas * self.count_from(self._start)
        if self._pads:
            rest += islice(cycle(order), max(end - len(rest), 0))  # torch, too, repeats the first samples
        return islice(rest, self.rank, end if self._pads else None, self.num_replicas)

    def __len__(self) -> int:
        """Returns the number of this rank's samples in a whole epoch."""
        return self.count_from(0)

    def count_from(self, start: int) -> int:
        """Returns the number of this rank's samples behind the first `start` of all ranks."""
        left, size = len(self.dataset) - start, self.num_replicas  # type: ignore[arg-type]
        if not self._pads:
            return len(range(self.rank, left, size))
        return left // size if self.drop_last else -(-left // size)


@dataclass
class _Progress:
    """The progress of a DataLoader. Numbers of samples count all ranks' samples.

    Attributes:
        first_epoch: the epoch from which epochs are counted in each world of an elastic job.
        epoch, start: the epoch of the next iteration, and the number of samples that were read in it before.
        is_chosen: whether the program has chosen that epoch, although no samples are left in it.
        read: the epoch of the batch that was read last, and the number of samples that were read in it.
        follows_state: whether an elastic state restores this progress.
    """

    first_epoch: int = 0
    epoch: int = 0
    start: int = 0
    is_chosen: bool = False
    read: tuple[int, int] | None = None
    follows_state: bool = False

    def choose(self, epoch: int) -> None:
        """Makes the next iteration that of an epoch, which continues if it was in progress."""
        if epoch != self.epoch:
            self.start = 0
        self.epoch, self.is_chosen, self.read = epoch, True, None

    def next(self, samples: int) -> tuple[int, int]:
        """Returns the epoch of the next iteration and the samples read in it, of so many in an epoch."""
        is_over = 0 < samples <= self.start and not self.is_chosen
        return (self.epoch + 1, 0) if is_over else (self.epoch, self.start)

    def begin(self, samples: int) -> tuple[int, int]:
        """Begins the next iteration. Returns what `next` does."""
        epoch, start = self.next(samples)
        self.epoch, self.start, self.is_chosen = epoch + 1, 0, False
        self.read = epoch, start
        return epoch, start

    def position(self) -> tuple[int, int]:
        """Returns the epoch, and the samples that were read in it, of what was read last."""
        return self.read or (self.epoch, self.start)

    def resume(self, epoch: int, start: int) -> None:
        """Makes the next iteration continue there."""
        self.epoch, self.start, self.is_chosen, self.read = epoch, start, False, None

    def enter_world(self) -> None:
        """Continues in another world of an elastic job."""
        self.resume(*(self.position() if self.follows_state else (self.first_epoch, 0)))


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

    `state_dict()` says how far the loader has come; after `load_state_dict()` on all ranks, whose number may
    have changed, it continues with the next sample. In an elastic job, give the loader to the state:
    `TorchState(model, optimizer, loader=loader)`.

    Raises:
        NotInitializedError: init() has not been called.
        ValueError: a custom sampler, or an IterableDataset, which no sampler can divide; `pad=False` with
            `drop_last`.

    Example:
        loader = hvd.DataLoader(dataset, batch_size=4, shuffle=True)
        for epoch in range(loader.epoch, 2):
            for inputs, targets in loader:
                ...
            hvd.on_root(torch.save, loader.state_dict(), "loader.pt")  # for loader.load_state_dict()
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
        self._own, self._progress = sampler, sampler._progress
        self._is_noted = process_set is global_process_set
        self._identity: int | None = None

    @property
    def epoch(self) -> int:
        """Returns the epoch that the next iteration begins or, after `load_state_dict`, continues."""
        return self._progress.next(self._samples)[0]

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch; without it, epochs are counted from 0.

        After `load_state_dict`, an epoch that was in progress continues, also if this sets it again; if all
        its batches were read, it has none left.

        In an elastic job epochs are counted again when the ranks change, unless the loader belongs to the
        state: from the epoch that was set before `hvd.elastic.run`, as on ranks that join.
        """
        context = find()
        self._progress.choose(epoch)
        if context is None or context.survivors is None or not context.survivors.has_begun:
            self._progress.first_epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and how far it has come with the batch that this rank has read last.

        It sends nothing, and is equal on all ranks that have read equally many batches. Batches that worker
        processes have prepared, but the program has not read, do not count.

        The keys: "epoch"; "position", the number of samples that all ranks have read in it; "samples", the
        length of the data set; "shuffle" and "seed", which determine the order.
        """
        epoch, position = self._progress.position()
        return {"epoch": epoch, "position": position} | self._order()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next iteration continue where another loader was, in the order of its epoch.

        With as many ranks and the same batch size as before, the batches are those that would have followed;
        otherwise each step reads the next `batch_size * hvd.size()` samples of the same order. All ranks must
        call it, with equal state.

        Raises:
            ValueError: the other loader has another length, seed or shuffle, hence another order.
        """
        own, given = self._order(), {key: state_dict.get(key) for key in self._order()}
        if given != own:
            raise ValueError(
                f"the state is that of an hvd.DataLoader with {_listed(given)}, and this loader has "
                f"{_listed(own)}: in another order the rest of an epoch would be other samples"
            )
        self._progress.resume(state_dict["epoch"], state_dict["position"])

    @property
    def _samples(self) -> int:
        return len(self._own.dataset)  # type: ignore[arg-type]

    def _order(self) -> dict[str, Any]:
        """Returns what determines the orders of epochs."""
        return {"samples": self._samples, "shuffle": self._own.shuffle, "seed": self._own.seed}

    def __iter__(self) -> Any:
        sampler, context = self._own, find()
        number, start = self._progress.begin(self._samples)
        sampler.begin(number, start)
        noted = None
        if self._is_noted and context is not None and context.size > 1:
            if self._identity is None:
                self._identity = _identity_of(sampler.dataset)
            order = (number, sampler.seed) if sampler.shuffle else (0, 0)
            if sampler.shuffle or self._identity:
                noted = context, Epoch(*order, self._samples, self._identity, start)
        return _EpochBatches(super().__iter__(), self, (number, start), noted)


class _EpochBatches:
    """The batches of an epoch, in its order even if another iteration has begun before the first batch.

    It records the loader's progress, and the epoch for the checks of the steps that follow.

    Args:
        batches: torch's iterator.
        begin: the epoch, and the samples of all ranks that were read in it before.
        noted: the world whose steps check the epoch, and the epoch; None: nothing is checked.
    """

    def __init__(
        self, batches: Any, loader: DataLoader, begin: tuple[int, int], noted: tuple[Context, Epoch] | None
    ) -> None:
        self._batches, self._begin, self._noted = batches, begin, noted
        self._sampler = sampler = loader._own
        size, count = loader.batch_size or 1, sampler.count_from(begin[1])
        self._of_all_ranks = size * sampler.num_replicas
        self._count = count // size if loader.drop_last else -(-count // size)
        self._index = -1  # of the last batch

    def __iter__(self) -> _EpochBatches:
        return self

    def __len__(self) -> int:
        return self._count

    def __next__(self) -> Any:
        number, start = self._begin
        if self._index < 0:  # without worker processes, torch asks the sampler for the order now
            self._sampler.begin(number, start)
        batch = next(self._batches)
        self._index += 1
        is_last = self._index + 1 == self._count
        position = start + (self._index + 1) * self._of_all_ranks
        self._sampler._progress.read = number, len(self._sampler.dataset) if is_last else position  # type: ignore[arg-type]
        if self._noted is not None:
            note_batch(*self._noted, self._index)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _listed(order: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in order.items())


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
