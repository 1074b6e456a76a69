"""A sampler that outlives a change of the number of ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import sirtaki.torch as hvd
from cases import case
from sirtaki.torch.elastic import sampler as module

SAMPLES = 50


class Place:
    """A rank of some world, for a sampler that only asks for rank and size."""

    survivors = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def samplers(
    size: int, state: dict[str, Any] | None = None, **options: Any
) -> list[hvd.elastic.ElasticSampler]:
    """Returns the samplers of all ranks of a world, in this process."""
    made = []
    for rank in range(size):
        with mock.patch.object(module, "current", lambda rank=rank: Place(rank, size)):
            one = hvd.elastic.ElasticSampler(range(SAMPLES), **options)
            if state is not None:
                one.load_state_dict(state)
        made.append(one)
    return made


def dealt(ranks: list[hvd.elastic.ElasticSampler]) -> list[int]:
    shares = [list(one) for one in ranks]
    assert {len(share) for share in shares} == {len(one) for one in ranks}
    assert len({len(share) for share in shares}) == 1
    return [sample for share in shares for sample in share]


def only_the_fill_comes_twice(taken: list[int], due: set[int], size: int) -> None:
    assert set(taken) == due
    assert len(taken) - len(due) < size


@case()
def every_sample_once() -> None:
    mine = hvd.elastic.ElasticSampler(range(SAMPLES))
    everyone = hvd.allgather(torch.tensor(list(mine))).tolist()
    only_the_fill_comes_twice(everyone, set(range(SAMPLES)), hvd.size())
    assert len(mine) == -(-SAMPLES // hvd.size())


@case()
def epochs_have_orders_of_their_own() -> None:
    one, other = (hvd.elastic.ElasticSampler(range(SAMPLES), seed=3) for _ in range(2))
    first = list(one)
    one.set_epoch(1)
    assert list(one) != first
    other.set_epoch(1)
    assert list(one) == list(other)
    plain = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=False)
    assert list(plain)[:3] == [hvd.rank() + hvd.size() * step for step in range(3)]


@case()
def an_epoch_that_ends_on_other_ranks() -> None:
    """Runs with 3 ranks, then 2, 4, 1 and 5, for a few steps each: every sample comes once."""
    if hvd.size() > 1:
        return
    state, taken = None, set()
    for size, steps in ((3, 2), (2, 5), (4, 1), (1, 7)):
        ranks = samplers(size, state)
        only_the_fill_comes_twice(dealt(ranks), set(range(SAMPLES)) - taken, size)
        batches = [sample for one in ranks for sample in list(one)[: 2 * steps]]
        assert taken.isdisjoint(batches)
        taken.update(batches)
        for one in ranks:
            for step in range(steps):
                one.record_batch(step, 2)
            assert one.processed_indices == taken
        state = ranks[-1].state_dict()
    rest = samplers(5, state)
    only_the_fill_comes_twice(dealt(rest), set(range(SAMPLES)) - taken, 5)
    state = rest[0].state_dict()
    state["deals"] = [(5, [(0, SAMPLES // 5)], [])]
    assert dealt(samplers(3, state)) == []
    state["deals"] = [(5, [], [sample for sample in range(SAMPLES) if sample != 7])]
    assert dealt(samplers(3, state)) == [7, 7, 7]


@case()
def with_a_loader() -> None:
    data = TensorDataset(torch.arange(SAMPLES))
    mine = hvd.elastic.ElasticSampler(data)
    seen: list[int] = []
    for step, (batch,) in enumerate(DataLoader(data, batch_size=4, sampler=mine)):
        seen += batch.tolist()
        mine.record_batch(step, 4)
    assert mine.processed_indices == set(range(SAMPLES))
    assert seen == list(mine)  # another epoch begins, in the same order
    assert mine.processed_indices == set()
    mine.record_batch(0, len(seen))
    mine.reset()
    assert len(mine) == 0
    mine.set_epoch(1)
    assert len(mine) == len(seen)


@case()
def samples_that_ranks_record_one_by_one() -> None:
    mine = hvd.elastic.ElasticSampler(range(SAMPLES))
    share = list(mine)[: 2 + hvd.rank()]
    mine.record_indices(share)
    assert mine.processed_indices == set(share)
    mine.merge()
    everyone = set(hvd.allgather(torch.tensor(share)).tolist())
    assert mine.processed_indices == everyone
    mine.reset()
    assert everyone.isdisjoint(mine)


@case()
def the_state_of_another_dataset() -> None:
    state = hvd.elastic.ElasticSampler(range(7)).state_dict()
    with pytest.raises(ValueError, match=r"7 samples.*50"):
        hvd.elastic.ElasticSampler(range(SAMPLES)).load_state_dict(state)
