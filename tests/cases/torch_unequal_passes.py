"""Programs whose ranks make different numbers of backward passes in a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from torch import nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_failed_passes import failing_loss
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


def train_with_a_retry(model: nn.Sequential, optimizer: Any, attempts: Callable[[], Any]) -> None:
    """On rank 1 a pass raises in step 2, as for lack of memory, and is made again with fewer rows."""
    for step in range(5):
        optimizer.zero_grad()
        with attempts():
            if step == 2 and hvd.rank() == 1:
                with pytest.raises(ArithmeticError):
                    failing_loss(model, step).backward()
                optimizer.zero_grad()
            own_loss(model, step).backward()
        optimizer.step()


@case(least=2)
def a_pass_that_is_made_again_on_one_rank() -> None:
    """The first attempt was this rank's part of the step; the second meets the next step of the others."""
    model = network()
    optimizer = distributed(model)
    own, other = "pass 2 of step 3", "pass 1 of step 4"
    if hvd.rank() != 1:
        own, other = other, own
    with pytest.raises(ParametersDifferError, match=f"is in {own}, and another rank in {other}"):
        train_with_a_retry(model, optimizer, nullcontext)


@case(least=2)
def a_pass_that_is_made_again_while_it_is_held() -> None:
    model = network()
    optimizer = distributed(model)
    train_with_a_retry(model, optimizer, optimizer.no_sync)
    assert_same_on_all_ranks(model)


@case(least=2)
def gradients_that_ranks_drop_in_different_ways() -> None:
    model = network()
    optimizer = distributed(model)
    for step in range(4):
        own_loss(model, step).backward()
        (optimizer if hvd.rank() == 0 else model).zero_grad()
        own_loss(model, step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_on_all_ranks(model)
