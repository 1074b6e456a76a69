"""The account of an epoch's samples, over random schedules of sizes, batches, commits and losses."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from elastic.torch_job import alone, one_thread  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import current, using  # noqa: E402
from sirtaki.bindings.survivors import Survivors  # noqa: E402

__all__ = ["alone", "one_thread"]  # fixtures that apply to all tests here


def place(rank: int, size: int) -> Any:
    """Returns a rank of some world, for a sampler, which asks for no more."""
    return SimpleNamespace(rank=rank, size=size, survivors=None)


class Ranks:
    """The samplers of all ranks, and an account that is kept sample by sample."""

    def __init__(self, length: int, shuffle: bool) -> None:
        self.length, self.shuffle = length, shuffle
        self.samplers: list[hvd.elastic.ElasticSampler] = []
        self.taken: list[int] = []  # in this epoch
        self.batch = 0  # of this deal
        self.shares: list[list[int]] = []  # of this deal, once it has begun

    def resize(self, size: int, state: dict[str, Any] | None) -> None:
        """Moves survivors to another world; newcomers get their account."""
        del self.samplers[size:]
        for rank, sampler in enumerate(self.samplers):
            sampler.move_to(place(rank, size))
        for rank in range(len(self.samplers), size):
            with using(place(rank, size)):
                sampler = hvd.elastic.ElasticSampler(range(self.length), self.shuffle, seed=3)
                if state is not None:
                    sampler.load_state_dict(pickle.loads(pickle.dumps(state)))
            self.samplers.append(sampler)
        self.batch, self.shares = 0, []

    def take(self, batch_size: int) -> None:
        """Processes the next batch on all ranks."""
        start = self.batch * batch_size
        size = len(self.samplers)
        left = self.length - len(set(self.taken))
        self.shares = self.shares or [list(sampler) for sampler in self.samplers]
        batches = [share[start : start + batch_size] for share in self.shares]
        assert len({len(one) for one in batches}) == 1
        new = [sample for one in batches for sample in one]
        again = len(self.taken) + len(new) - len({*self.taken, *new})
        assert again < size  # only what fills the last batch
        assert not again or len(new) - again == min(left, len(new) - again) == left
        self.taken = [*dict.fromkeys([*self.taken, *new])]
        for sampler in self.samplers:
            sampler.record_batch(self.batch, batch_size)
            assert sampler.processed_indices == set(self.taken)
        self.batch += 1


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_sample_is_lost_or_repeated(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 60), "length")
    ranks = Ranks(length, data.draw(st.booleans(), "shuffle"))
    ranks.resize(data.draw(st.integers(1, 5), "size"), None)
    batch_size = data.draw(st.integers(1, 4), "batch size")
    state, committed, done = ranks.samplers[0].state_dict(), [], False
    while not done:
        action = data.draw(st.sampled_from(["batch"] * 6 + ["commit"] * 3 + ["loss", "change"]))
        if action == "batch":
            if ranks.batch * batch_size >= len(ranks.samplers[0]):
                done = True
                continue
            ranks.take(batch_size)
        elif action == "commit":
            state, committed = copy.deepcopy(ranks.samplers[0].state_dict()), list(ranks.taken)
            assert all(sampler.state_dict() == state for sampler in ranks.samplers)
        else:
            if action == "loss":  # the rest of the epoch begins at the commit
                for sampler in ranks.samplers:
                    sampler._take_account(state)
                ranks.taken = list(committed)
            state = ranks.samplers[0].state_dict()
            committed = list(ranks.taken)
            ranks.resize(data.draw(st.integers(1, 5), "new size"), state)
            batch_size = data.draw(st.integers(1, 4), "new batch size")
    assert sorted(ranks.taken) == list(range(length))


def test_the_account_does_not_grow_with_the_data() -> None:
    def account(length: int) -> dict[str, Any]:
        sampler = hvd.elastic.ElasticSampler(range(length))
        for batch in range(50):
            sampler.record_batch(batch, 4)
        return sampler.state_dict()

    assert account(100_000)["deals"] == account(1_000)["deals"] == [(1, [(0, 200)], [])]


def test_batches_in_any_order() -> None:
    sampler = hvd.elastic.ElasticSampler(range(20))
    order = list(sampler)
    for batch in (3, 0, 1):
        sampler.record_batch(batch, 3)
    assert sampler.state_dict()["deals"] == [(1, [(0, 6), (9, 12)], [])]
    sampler.record_indices([order[7]])
    sampler.reset()
    assert list(sampler) == [*order[6:7], *order[8:9], *order[12:]]
    other = hvd.elastic.ElasticSampler(range(20))
    other.load_state_dict(sampler.state_dict())
    assert list(other) == list(sampler)


def test_samples_that_fill_the_last_batch_count_as_processed() -> None:
    with using(place(0, 3)):
        sampler = hvd.elastic.ElasticSampler(range(4), shuffle=False)
        sampler.record_batch(1, 1)
        assert sampler.processed_indices == {3, 0, 1}
        sampler.reset()
        assert list(sampler) == [2]


def test_an_epoch_goes_on_when_it_is_set_again() -> None:
    sampler = hvd.elastic.ElasticSampler(range(20))
    sampler.set_epoch(1)
    sampler.record_batch(0, 5)
    sampler.set_epoch(1)
    sampler.reset()
    assert len(sampler) == 15
    sampler.set_epoch(2)
    assert len(sampler) == 20


def epoch_of(sampler: hvd.elastic.ElasticSampler, batch_size: int, drop_last: bool) -> int:
    """Iterates a loader once, records its batches, and returns their number."""
    loader = torch.utils.data.DataLoader(
        sampler.dataset, batch_size, sampler=sampler, drop_last=drop_last, collate_fn=list
    )
    number = -1
    for number, _ in enumerate(loader):
        sampler.record_batch(number, batch_size)
    return number + 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_epochs_without_set_epoch_are_complete_after_a_change(drop_last: bool, at: int) -> None:
    """The ranks change behind the first epoch, or in the second one, at the commit of its first batch."""
    with using(place(0, 2)):
        sampler = hvd.elastic.ElasticSampler(range(43), shuffle=False)
    full = 22 // 4 if drop_last else -(-22 // 4)
    assert epoch_of(sampler, 4, drop_last) == full
    if at == 2:
        next(iter(sampler))
        sampler.record_batch(0, 4)
    state = sampler.state_dict()
    with using(place(1, 3)):
        joined = hvd.elastic.ElasticSampler(range(43), shuffle=False)
        joined._take_account(state)
    sampler._take_account(state)
    for rank, one in enumerate((sampler, joined)):
        one.move_to(place(rank, 3))
    rest = [epoch_of(one, 4, drop_last) for one in (sampler, joined)]
    assert rest[0] == rest[1] == (0 if at == 1 else 12 // 4)  # 35 samples, or less than a batch
    for _ in range(2):
        numbers = [epoch_of(one, 4, drop_last) for one in (sampler, joined)]
        assert numbers == [15 // 4 if drop_last else -(-15 // 4)] * 2
    assert sampler.state_dict() == joined.state_dict()


@pytest.mark.filterwarnings("error")
def test_a_shuffled_epoch_that_is_repeated_is_reported_once() -> None:
    sampler = hvd.elastic.ElasticSampler(range(8))
    first = list(sampler)
    sampler.record_batch(0, 8)
    with pytest.warns(UserWarning, match=r"same order.*set_epoch"):
        assert list(sampler) == first
    sampler.record_batch(0, 8)
    assert list(sampler) == first  # a warning would be an error


@pytest.mark.filterwarnings("ignore:another epoch")
def test_samples_that_one_rank_alone_knows_of_do_not_end_an_epoch() -> None:
    """Otherwise this rank alone would begin another epoch."""
    sampler = hvd.elastic.ElasticSampler(range(4))
    sampler.record_batch(0, 1)
    sampler.reset()
    for _ in range(2):
        sampler.record_indices(list(sampler))
        assert len(list(sampler)) == 3
    sampler.merge()
    assert len(list(sampler)) == 4


class Commits:
    """Stands for `hvd.elastic.run`, which uses the state."""

    def check_operations(self) -> None: ...

    def count_commit(self) -> None: ...

    def check(self, state: Any) -> None: ...


def test_a_sampler_that_is_no_part_of_the_state_is_refused() -> None:
    context = current()
    with mock.patch.object(context, "survivors", Survivors()):
        outside, validation, inside = (hvd.elastic.ElasticSampler(range(8)) for _ in range(3))
        context.survivors.begin()
        of_the_function = hvd.elastic.ElasticSampler(range(8))
        state = hvd.elastic.TorchState(sampler=inside)
        state._commits = Commits()
        list(validation)
        for one in (inside, of_the_function):
            one.record_batch(0, 2)
            state.commit()
        outside.record_batch(0, 2)
        with pytest.raises(ValueError, match=r"rank 0 .*TorchState\(..., sampler=sampler\)"):
            state.commit()
        outside.state_dict()  # a state of one's own
        state.commit()
