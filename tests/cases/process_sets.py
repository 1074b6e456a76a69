"""Process sets: their members, concurrent operations, and the errors of ranks that are not members."""

from __future__ import annotations

import numpy as np
import pytest

import sirtaki.numpy as hvd
from cases import case
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import HorovodInternalError, MismatchError
from sirtaki.bindings.request import Batch


def everyone_still_works() -> None:
    assert hvd.allreduce(np.ones(()), op=hvd.Sum) == hvd.size()


@case(least=2)
def every_operation_in_a_set() -> None:
    ranks = list(range(0, hvd.size(), 2))
    evens = hvd.add_process_set(ranks)
    if hvd.rank() in ranks:
        place = ranks.index(hvd.rank())
        assert (evens.rank(), evens.size(), evens.included()) == (place, len(ranks), True)
        mine = np.full(len(ranks), hvd.rank() + 1.0)
        total = sum(rank + 1.0 for rank in ranks)
        assert hvd.allreduce(mine, op=hvd.Sum, process_set=evens).tolist() == [total] * len(ranks)
        assert hvd.allreduce(mine, process_set=evens).tolist() == [total / len(ranks)] * len(ranks)
        assert hvd.allgather(mine[:1], process_set=evens).tolist() == [rank + 1.0 for rank in ranks]
        assert hvd.broadcast(mine, ranks[-1], process_set=evens).tolist() == [ranks[-1] + 1.0] * len(ranks)
        assert hvd.reducescatter(mine, op=hvd.Sum, process_set=evens).tolist() == [total]
        assert hvd.alltoall(mine, process_set=evens).tolist() == [rank + 1.0 for rank in ranks]
        assert hvd.broadcast_object({"from": hvd.rank()}, ranks[-1], process_set=evens) == {"from": ranks[-1]}
        assert hvd.allgather_object(hvd.rank(), process_set=evens) == ranks
        hvd.barrier(evens)
    else:
        assert evens.included() is False
        with pytest.raises(ValueError, match="does not belong"):
            evens.rank()
    everyone_still_works()
    assert hvd.remove_process_set(evens)


@case(least=2)
def those_who_do_not_belong_are_told() -> None:
    alone = hvd.add_process_set([0])
    if hvd.rank() == 0:
        assert hvd.allreduce(np.array(3.0), op=hvd.Sum, process_set=alone) == 3.0
        with pytest.raises(ValueError, match="one of the ranks 0"):
            hvd.broadcast(np.ones(2), 1, process_set=alone)
    else:
        for call in (
            lambda: hvd.allreduce(np.ones(2), process_set=alone),
            lambda: hvd.allgather(np.ones(2), process_set=alone),
            lambda: hvd.reducescatter(np.ones(2), process_set=alone),
            lambda: hvd.barrier(alone),
            lambda: hvd.join(process_set=alone),
        ):
            with pytest.raises(ValueError, match="not a member of process set") as caught:
                call()
            assert not isinstance(caught.value, HorovodInternalError)
    everyone_still_works()
    assert hvd.remove_process_set(alone)


@case(least=2)
def a_set_lives_from_adding_to_removing() -> None:
    group = hvd.ProcessSet([0])
    assert (group.process_set_id, group.size(), group.rank(), group.included()) == (None,) * 4
    with pytest.raises(ValueError, match="add_process_set"):
        hvd.allreduce(np.ones(1), process_set=group)
    assert not hvd.remove_process_set(group)
    assert hvd.add_process_set(group) is group
    assert group.process_set_id is not None
    assert str(group) == f"ProcessSet(process_set_id={group.process_set_id}, ranks=[0], mpi_comm=None)"
    ranks = list(range(hvd.size()))
    assert str(hvd.global_process_set) == f"ProcessSet(process_set_id=0, ranks={ranks}, mpi_comm=None)"
    with pytest.raises(ValueError, match="in use"):
        hvd.add_process_set(group)
    assert hvd.remove_process_set(group)
    assert group.process_set_id is None
    hvd.add_process_set(group)
    assert hvd.remove_process_set(group)
    everyone_still_works()


@case()
def the_set_of_all_ranks_is_always_there() -> None:
    everyone = hvd.global_process_set
    assert everyone.process_set_id == 0
    assert everyone.ranks == list(range(hvd.size()))
    assert (everyone.rank(), everyone.size(), everyone.included()) == (hvd.rank(), hvd.size(), True)
    assert not hvd.remove_process_set(everyone)


@case()
def sets_that_cannot_be_added() -> None:
    for ranks, words in (
        (list(range(hvd.size())), "has these ranks already"),
        ([], "at least one rank"),
        ([hvd.size()], r"is not in this job \(ranks 0 to"),
        ([0, 0], "each of its ranks once"),
        ([-1], "rank -1 is not in this job"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.add_process_set(ranks)
    with pytest.raises(ValueError, match="list of ranks"):
        hvd.ProcessSet(["first"])
    everyone_still_works()


@case(least=2)
def ranks_that_name_different_sets_are_told() -> None:
    with pytest.raises(MismatchError, match="the ranks"):
        hvd.add_process_set([0] if hvd.rank() == 0 else [1])
    everyone_still_works()


@case(least=4)
def disjoint_sets_do_not_wait_for_each_other() -> None:
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    mine = pairs[hvd.rank() // 2] if hvd.rank() < 4 else None
    if mine is pairs[0]:
        for step in range(50):  # the other pair is idle meanwhile
            assert hvd.allreduce(np.array(step), op=hvd.Sum, process_set=mine) == 2 * step
    hvd.barrier()
    if mine is pairs[1]:
        for step in range(50):
            assert hvd.allreduce(np.array(step), op=hvd.Sum, process_set=mine) == 2 * step
    hvd.barrier()
    for pair in pairs:
        assert hvd.remove_process_set(pair)


@case(least=3)
def overlapping_sets_under_random_timing() -> None:
    size, rank = hvd.size(), hvd.rank()
    members = [[0, 1], [1, 2], [0, size - 1], [0, 1, 2]]
    sets = [hvd.add_process_set(ranks) for ranks in members if len(ranks) < size]
    sets.append(hvd.global_process_set)
    random = np.random.default_rng(rank)  # a different order on each rank
    for step in range(60):
        mine = [group for group in sets if rank in group.ranks]
        handles = []
        for place in random.permutation(len(mine)):
            group, number = mine[place], mine[place].process_set_id
            value = np.full(1 + 997 * (step % 4), rank + step, np.int64)
            handle = hvd.allreduce_async(value, op=hvd.Sum, name=f"set{number}.{step % 7}", process_set=group)
            handles.append((group, handle))
        for place in random.permutation(len(handles)):
            group, handle = handles[place]
            expected = sum(group.ranks) + step * len(group.ranks)
            assert (hvd.synchronize(handle) == expected).all()
    hvd.barrier()
    for group in sets[:-1]:
        assert hvd.remove_process_set(group)


@case(least=2)
def members_add_a_set_by_themselves() -> None:
    """Only its ranks submit it, and no other rank has to know of it."""
    context, ranks = current(), list(range(1, hvd.size()))
    if context.rank in ranks:
        for attempt in range(2):  # there may be several sets of the same ranks
            batch = Batch(1)
            batch.set_member_set_request(0, ranks, f"own {attempt}")
            context.run(batch)
            number = context.result_number(batch)
            context.release(batch)
            assert context.members(number) == ranks
    for wrong in (
        [],
        [context.rank, context.rank],
        [context.rank, hvd.size()],
        [(context.rank + 1) % hvd.size()],
    ):
        batch = Batch(1)
        batch.set_member_set_request(0, wrong, "wrong")
        with pytest.raises(ValueError, match=f"and rank {context.rank} among them"):
            context.run(batch)
    hvd.barrier()
