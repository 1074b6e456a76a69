"""Programs whose ranks make different numbers of backward passes in a step."""

from __future__ import annotations

import pytest

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import assert_same_on_all_ranks, distributed, network, own_loss
from sirtaki.common.exceptions import ParametersDifferError


@case(least=2, overlap=[False, True])
def more_passes_on_one_rank(overlap: bool) -> None:
    """Its second pass meets the next step of the others, and no rank waits."""
    model = network()
    optimizer = distributed(model, overlap_forward=overlap)
    for step in range(5):
        optimizer.zero_grad()
        own_loss(model, step).backward()
        optimizer.step()
    optimizer.zero_grad()
    own_loss(model, 5).backward()
    own, other = "pass 2 of step 6", "pass 1 of step 7"
    if hvd.rank() != 1:
        optimizer.step()
        optimizer.zero_grad()
        own, other = other, own
    own_loss(model, 6).backward()

    def step_and_wait() -> None:
        optimizer.step()  # returns before the comparison has arrived if the exchange overlaps
        optimizer.synchronize()

    label = rf"rank {hvd.rank()} \(pid \d+ on \S+\)"
    with pytest.raises(ParametersDifferError, match=f"{label} is in {own}, and another rank in {other}"):
        step_and_wait()


@case(least=2)
def fewer_passes_on_one_rank() -> None:
    """Two passes in each step are usual, and not compared; the first pass too many in a later step is."""
    model = network()
    optimizer = distributed(model)

    def passes(count: int) -> None:
        for number in range(count):
            own_loss(model, number).backward()

    for _ in range(4):
        optimizer.zero_grad()
        passes(2)
        optimizer.step()
    optimizer.zero_grad()
    passes(1 if hvd.rank() == 1 else 2)
    optimizer.step()
    optimizer.zero_grad()
    passes(2 if hvd.rank() == 1 else 1)
    with pytest.raises(
        ParametersDifferError, match="pass 1 of step 6" if hvd.rank() != 1 else "pass 2 of step 6"
    ):
        optimizer.step()


@case(least=2)
def passes_that_stay_on_the_rank_may_differ_in_number() -> None:
    model = network()
    optimizer = distributed(model)
    for step in range(4):
        optimizer.zero_grad()
        with optimizer.no_sync():
            for number in range(hvd.rank()):
                own_loss(model, number).backward()
        own_loss(model, step).backward()
        if step % 2:
            own_loss(model, step).backward()
        optimizer.step()
    assert_same_on_all_ranks(model)


@case(least=2)
def steps_that_ranks_took_before_a_join_do_not_count() -> None:
    model = network()
    optimizer = distributed(model)
    for _ in range(2):
        for step in range(2 + hvd.rank()):
            optimizer.zero_grad()
            own_loss(model, step).backward()
            own_loss(model, step).backward()
            optimizer.step()
        hvd.join(model=model, optimizer=optimizer)
    assert_same_on_all_ranks(model)
