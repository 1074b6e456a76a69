"""Each rank's part of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import distributed, generator, network

SAMPLES = 25


def samples() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES))


@case(shuffle=(False, True))
def a_sampler_needs_no_numbers(shuffle: bool) -> None:
    """The samples equal those of torch's sampler, which must be given rank and size."""
    ours = hvd.DistributedSampler(samples(), shuffle=shuffle, seed=3)
    theirs = DistributedSampler(samples(), hvd.size(), hvd.rank(), shuffle, 3)
    assert isinstance(ours, DistributedSampler)
    for epoch in range(2):
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
    everyone = {sample for each in hvd.allgather_object(list(ours)) for sample in each}
    assert everyone == set(range(SAMPLES))


@case(count=(25, 24, 2, 0))
def each_sample_is_evaluated_once(count: int) -> None:
    """Also if there are fewer samples than ranks, or none."""
    data = TensorDataset(torch.arange(count))
    for shuffle in (False, True):
        sampler = hvd.DistributedSampler(data, shuffle=shuffle, pad=False)
        loader = hvd.DataLoader(data, 3, shuffle, pad=False)
        mine = list(sampler)
        assert len(mine) == len(sampler)
        read = [sample for (batch,) in loader for sample in batch.tolist()]
        for parts in zip(*hvd.allgather_object((mine, read)), strict=True):
            assert sorted(sample for part in parts for sample in part) == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@case()
def samples_that_are_neither_repeated_nor_left_out() -> None:
    for make in (hvd.DistributedSampler, hvd.DataLoader):
        with pytest.raises(ValueError, match="pad=False leaves out no samples, and drop_last=True does"):
            make(samples(), drop_last=True, pad=False)


@case(least=2)
def a_sampler_of_some_ranks() -> None:
    some = hvd.add_process_set(range(1, hvd.size()))
    if hvd.rank():
        mine = hvd.DistributedSampler(samples(), shuffle=False, process_set=some)
        assert list(mine)[:2] == [hvd.rank() - 1, hvd.rank() - 2 + hvd.size()]
    else:
        with pytest.raises(ValueError, match="rank 0 does not belong to"):
            hvd.DistributedSampler(samples(), process_set=some)


@case(drop_last=(False, True))
def a_loader_shares_out_by_itself(drop_last: bool) -> None:
    loader = hvd.DataLoader(samples(), batch_size=2, shuffle=True, drop_last=drop_last)
    epochs = [[batch.tolist() for (batch,) in loader] for _ in range(2)]
    assert len(loader) == len(epochs[0])
    everyone = hvd.allgather_object(epochs)
    assert len({len(one) for each in everyone for one in each}) == 1  # all ranks take as many steps
    seen = [[sample for rank in everyone for batch in rank[epoch] for sample in batch] for epoch in range(2)]
    assert seen[0] != seen[1]
    if drop_last:
        assert all(len(set(epoch)) == len(epoch) for epoch in seen)
    else:
        assert all(set(epoch) == set(range(SAMPLES)) for epoch in seen)
    loader.set_epoch(0)
    assert [batch.tolist() for (batch,) in loader] == epochs[0]


@case()
def two_iterations_at_once_have_their_own_orders() -> None:
    loader = hvd.DataLoader(samples(), 4, shuffle=True)
    first, second = (torch.cat([batch for (batch,) in loader]) for _ in range(2))
    loader.set_epoch(0)
    pairs = [(one, two) for (one,), (two,) in zip(loader, loader, strict=True)]
    together = [torch.cat(column) for column in zip(*pairs, strict=True)]
    assert torch.equal(together[0], first)
    assert torch.equal(together[1], second)
    assert not torch.equal(first, second)


def read(loader: Any, count: int | None = None) -> list[list[int]]:
    """Returns the samples of the next batches, or of all that are left."""
    return [batch.tolist() for (batch,) in islice(loader, count)]


@case(option=("shuffle", "drop_last", ""))
def a_loader_continues_within_an_epoch(option: str) -> None:
    """The batches are those that would have followed."""
    options = {option: True} if option else {}
    loader = hvd.DataLoader(samples(), 2, **options)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert set(hvd.allgather_object(str(state))) == {str(state)}
    other = hvd.DataLoader(samples(), 2, **options)
    other.load_state_dict(state)
    assert other.epoch == 0
    assert other.state_dict() == state
    resumed = iter(other)
    assert len(resumed) == len(loader) - 1
    assert len(other) == len(loader)
    assert [batch.tolist() for (batch,) in resumed] == [batch.tolist() for (batch,) in batches]
    assert other.state_dict() == loader.state_dict()
    assert read(other) == read(loader)


@case(least=2, batch_size=(1, 2, 3))
def a_loader_continues_on_other_ranks(batch_size: int) -> None:
    """No sample is lost, and what is repeated fills the last batch; then the next epoch begins."""
    shuffle = batch_size != 2
    loader = hvd.DataLoader(samples(), 2, shuffle=shuffle)
    before = read(loader, 2)
    state = loader.state_dict()
    ranks = range(max(hvd.size() - 1, 1))
    some = hvd.add_process_set(ranks)
    after: list[list[int]] = []
    following: list[list[int]] = []
    if hvd.rank() in ranks:
        other = hvd.DataLoader(samples(), batch_size, shuffle=shuffle, process_set=some)
        other.load_state_dict(state)
        after, following = read(other), read(other)
    everyone = hvd.allgather_object((before, after, following))
    done = {sample for before, _, _ in everyone for batch in before for sample in batch}
    rest = [sample for _, after, _ in everyone for batch in after for sample in batch]
    assert len(done) == min(4 * hvd.size(), SAMPLES)
    assert set(rest) >= set(range(SAMPLES)) - done
    assert len(rest) - (SAMPLES - len(done)) < len(ranks)
    # In the order of the epoch: the samples of a step, over all ranks, follow those of the step before.
    whole = hvd.DistributedSampler(samples(), 1, 0, shuffle=shuffle)
    whole.set_epoch(0)
    order = list(whole)[len(done) :]
    parts = [[sample for batch in after for sample in batch] for _, after, _ in everyone[: len(ranks)]]
    assert [sample for turn in zip(*parts, strict=True) for sample in turn][: len(order)] == order
    new = {sample for _, _, following in everyone for batch in following for sample in batch}
    assert new == set(range(SAMPLES))


@case()
def a_loader_whose_epoch_was_over() -> None:
    """`epoch` counts on, and a program that sets the epoch again has no batches of it left."""
    loader = hvd.DataLoader(samples(), 2, shuffle=True)
    assert loader.state_dict()["position"] == loader.epoch == 0
    first, state = read(loader), loader.state_dict()
    assert loader.epoch == 1
    second = read(loader)
    other = hvd.DataLoader(samples(), 2, shuffle=True)
    other.load_state_dict(state)
    assert other.epoch == 1
    assert read(other) == second
    other.load_state_dict(state)
    other.set_epoch(0)
    assert (other.epoch, read(other), read(other)) == (0, [], second)
    other.load_state_dict(state)
    other.set_epoch(1)
    assert read(other) == second
    other.set_epoch(0)
    assert read(other) == first
    with pytest.raises(
        ValueError, match="with samples=25, shuffle=True, seed=0, and this loader has samples=2"
    ):
        hvd.DataLoader(TensorDataset(torch.arange(2)), shuffle=True).load_state_dict(state)


@case(least=2)
def a_state_that_one_rank_has_not_loaded() -> None:
    """It would read samples that others have read already."""
    loader, epoch = batches_to_train_on()
    next(iter(loader))
    state = loader.state_dict()
    loader.set_epoch(0)
    if hvd.rank() != 1:
        loader.load_state_dict(state)
    text = rf"on epoch 0 of {SAMPLES} samples \(seed 0, from sample {2 * hvd.size()}\), and rank 1 "
    with pytest.raises(ValueError, match=text):
        epoch()


def training_step() -> Callable[[Any], None]:
    """Returns a function that trains a model on a batch."""
    model = network()
    optimizer = distributed(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


def batches_to_train_on(**options: Any) -> tuple[Any, Callable[[], None]]:
    """Returns a shuffled loader, and a function that trains on an epoch of it."""
    data = TensorDataset(torch.randn(SAMPLES, 4, dtype=torch.float64))
    loader = hvd.DataLoader(data, batch_size=2, shuffle=True, **options)
    step = training_step()

    def epoch() -> None:
        for (batch,) in loader:
            step(batch)

    return loader, epoch


@case(least=2)
def a_look_at_the_data_of_one_rank() -> None:
    """The rank's next epoch would overlap with that of others: refused in its second step, on all ranks."""
    loader, epoch = batches_to_train_on()
    epoch()
    if hvd.rank() == 1:
        next(iter(loader))
    with pytest.raises(ValueError, match="different epochs") as caught:
        epoch()
    text = str(caught.value)
    assert f"on epoch 1 of {SAMPLES} samples (seed 0), and rank 1 (" in text
    assert f"on epoch 2 of {SAMPLES} samples (seed 0), so" in text
    assert set(hvd.allgather_object(text)) == {text}
    loader.set_epoch(3)
    epoch()


@case(least=2)
def looks_that_do_no_harm() -> None:
    """A look on all ranks, one into data that is read in order, one between batches, and reading ahead."""
    loader, epoch = batches_to_train_on()
    in_order = hvd.DataLoader(samples(), batch_size=2)
    next(iter(loader))
    epoch()
    other = hvd.DataLoader(samples(), batch_size=2, shuffle=True)
    if hvd.rank() == 0:
        next(iter(in_order))
        next(iter(other))  # no step uses it
        with ThreadPoolExecutor(1) as reader:  # it is ahead by another number of batches on each rank
            assert len(reader.submit(list, other).result()) == len(other)
    epoch()
    assert len(iter(loader)) == len(loader)


@case(least=2)
def looks_at_other_data_while_training() -> None:
    """One rank looks, between a batch and its step, at data that have an order of their own."""
    loader, _ = batches_to_train_on()
    shown = hvd.DataLoader(samples(), batch_size=2, shuffle=True, seed=7)
    step = training_step()
    for epoch in range(3):
        for index, (batch,) in enumerate(loader):
            if hvd.rank() == 0 and (index == 2 * epoch or index == len(loader) - 1):
                next(iter(shown))  # also in two steps in succession: in the last and the first one
            step(batch)


@case(least=2)
def other_data_that_ranks_read_unequally_often() -> None:
    """Training data come from a loader whose epochs are unknown."""
    other = hvd.DataLoader(samples(), batch_size=2, shuffle=True)
    step = training_step()
    for index in range(9):
        if index % 3 == 0:
            for _ in range(1 + hvd.rank()):
                next(iter(other))
        step(torch.randn(2, 4, dtype=torch.float64))


@case(least=2)
def other_data_on_one_rank() -> None:
    """A rank whose epoch is unknown differs from no other, and the others' is not in doubt for ever."""
    loader, _ = batches_to_train_on()
    step = training_step()
    for _ in range(2):
        for (batch,) in loader:
            step(torch.randn(2, 4, dtype=torch.float64) if hvd.rank() == 0 else batch)


@case(least=2)
def batches_that_one_rank_skips() -> None:
    """It begins the second epoch while others are still in the first one."""
    loader, _ = batches_to_train_on()
    step = training_step()
    for _ in range(2):
        for index, (batch,) in enumerate(loader):
            if hvd.rank() != 1 or index not in (1, 2):
                step(batch)
    hvd.join()


@case(least=2)
def data_sets_of_which_each_rank_chooses_one() -> None:
    small = hvd.DataLoader(TensorDataset(torch.randn(SAMPLES, 4, dtype=torch.float64)), 1, shuffle=True)
    large = hvd.DataLoader(TensorDataset(torch.randn(2 * SAMPLES, 4, dtype=torch.float64)), 1, shuffle=True)
    next(iter(large))  # on all ranks
    tasks = iter(small), iter(large)
    step = training_step()
    for index in range(8):
        (batch,) = next(tasks[(index // 2 + hvd.rank()) % 2])
        step(batch)


@case(least=2)
def epochs_of_different_seeds() -> None:
    _, epoch = batches_to_train_on(seed=hvd.rank())
    with pytest.raises(ValueError, match=r"\(seed 0\), and rank 1 .*\(seed 1\)"):
        epoch()


def epoch_of(data: Any, *, shuffle: bool) -> None:
    step = training_step()
    for batch, _ in hvd.DataLoader(data, batch_size=2, shuffle=shuffle):
        step(batch)


def labelled(seed: int) -> TensorDataset:
    """Returns samples that are equal up to rounding, with labels of a seed."""
    values = torch.ones(SAMPLES, 4, dtype=torch.float64) + 1e-15 * hvd.rank()
    return TensorDataset(values, torch.randint(10, (SAMPLES,), generator=generator(seed)))


@case(least=2, shuffle=(False, True))
def data_that_each_rank_has_split_for_itself(shuffle: bool) -> None:
    """Validation samples of one rank would be training samples of another."""
    sizes = [SAMPLES - 5, 5]
    split = random_split(labelled(0), sizes, generator=generator(hvd.rank()))
    with pytest.raises(ValueError, match=f"different data sets of {SAMPLES - 5} samples: .*random_split"):
        epoch_of(split[0], shuffle=shuffle)
    epoch_of(random_split(labelled(0), sizes, generator=generator(1))[0], shuffle=shuffle)


@case(least=2)
def data_with_other_labels_on_each_rank() -> None:
    with pytest.raises(ValueError, match="have different data sets"):
        epoch_of(ConcatDataset([labelled(0), labelled(hvd.rank())]), shuffle=True)
    epoch_of(ConcatDataset([labelled(0), labelled(1)]), shuffle=True)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


@case()
def loaders_that_cannot_share_out() -> None:
    with pytest.raises(ValueError, match="sampler, and was given batch_sampler and sampler"):
        hvd.DataLoader(samples(), sampler=[1], batch_sampler=[[1]])
    with pytest.raises(ValueError, match="islice"):
        hvd.DataLoader(Stream())


@case(least=2)
def uneven_data_and_a_join_that_mends() -> None:
    """After join(model=…, optimizer=…) all ranks continue from the last rank's state."""
    model = network()
    optimizer = distributed(model)
    for step in range(2 + hvd.rank()):
        optimizer.zero_grad()
        model(torch.full((2, 4), step + 1.0 + hvd.rank(), dtype=torch.float64)).sum().backward()
        optimizer.step()
    before = model[0].weight.detach().clone()
    last = hvd.join(model=model, optimizer=optimizer)
    assert last == hvd.size() - 1
    assert torch.equal(model[0].weight, before) == (hvd.rank() == last)
    hvd.check_parameters(model)
    hvd.check_parameters(optimizer)
    optimizer.zero_grad()
    model(torch.ones(2, 4, dtype=torch.float64) * hvd.rank()).sum().backward()
    optimizer.step()
    hvd.check_parameters(optimizer)
