"""Each rank's part of a data set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import distributed, network

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
