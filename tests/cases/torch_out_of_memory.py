"""A rank that runs out of memory: no rank uses its batch, and no rank is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_failed_passes import failing
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    distributed,
    leaving_early,
    network,
    own_loss,
    sgd,
    train,
    whole_loss,
)
from cases.warned import warnings_of_this_rank
from sirtaki.common.exceptions import BatchSkippedError

STEPS = 4
FULL = 2  # the step whose batch is skipped


def allocate() -> Tensor:
    """Runs out of memory."""
    return torch.empty(1 << 50)


def fails(phase: str, model: nn.Sequential) -> Any:
    """Returns the model with a pass that runs out of memory: in the forward, or half of the backward pass."""
    if phase == "forward":
        return lambda inputs: model(inputs) + allocate()
    return failing(model, allocate)


def step_of(model: nn.Sequential, optimizer: Any, step: int, phase: str, rank: int) -> bool:
    """Takes a step, in which a rank may run out of memory. Returns whether the batch was skipped."""
    full = step == FULL and hvd.rank() == rank
    with hvd.skip_if_out_of_memory(optimizer) as batch:
        optimizer.zero_grad()
        own_loss(fails(phase, model) if full else model, step).backward()
        optimizer.step()
    return batch.skipped


def expect_whole(model: nn.Sequential, width: int) -> None:
    """Checks that the model is that of one process that has never seen the skipped batch."""
    plain = network(width=width)
    optimizer = sgd(plain)
    for step in range(STEPS):
        if step != FULL:
            train(plain, optimizer, lambda model, _, step=step: whole_loss(model, step), steps=1)
    assert_alike(model, plain)
    assert_same_on_all_ranks(model)


@case(phase=("forward", "backward", "early"))
def a_batch_that_one_rank_has_no_memory_for(phase: str) -> None:
    width = 600 if phase == "early" else 5  # a part of the gradients is sent before the pass fails
    model = network(width=width)
    optimizer = leaving_early(distributed(model))
    rank = hvd.size() - 1
    with warnings_of_this_rank() as caught:
        skipped = [step_of(model, optimizer, step, phase, rank) for step in range(STEPS)]
        everyone = hvd.allgather_object(caught)
    assert skipped == [step == FULL for step in range(STEPS)]
    expect_whole(model, width)
    texts = [text for each in everyone for text in each if "ran out of memory" in text]
    assert len(texts) == 1, texts
    assert texts[0].startswith(f"rank {rank} ran out of memory in ")
    assert "torch_out_of_memory.py:" in texts[0]
    assert "so all ranks skip this batch: " in texts[0]


@case(least=2)
def ranks_that_have_no_memory_at_once() -> None:
    model = network()
    optimizer = distributed(model)
    with warnings_of_this_rank():
        for step in range(STEPS):
            assert step_of(model, optimizer, step, "backward", hvd.rank()) == (step == FULL)
    expect_whole(model, 5)


@case(least=2)
def memory_that_lacks_in_the_first_of_two_passes() -> None:
    """The other ranks have both passes behind them when they learn of it."""
    model = network()
    optimizer = distributed(model, backward_passes_per_step=2)
    with warnings_of_this_rank():
        for step in range(STEPS):
            with hvd.skip_if_out_of_memory(optimizer) as batch:
                optimizer.zero_grad()
                full = step == FULL and hvd.rank() == 0
                own_loss(fails("backward", model) if full else model, step).div(2).backward()
                own_loss(model, step).div(2).backward()
                optimizer.step()
            assert batch.skipped == (step == FULL)
    expect_whole(model, 5)


@case(least=2)
def a_rank_without_the_context_is_told() -> None:
    model = network()
    optimizer = distributed(model)
    with warnings_of_this_rank():
        if hvd.rank() == 0:
            assert step_of(model, optimizer, FULL, "forward", 0)
        else:
            with pytest.raises(BatchSkippedError, match=r"rank 0 \(pid .*`with hvd.skip_if_out_of_memory"):
                own_loss(model, FULL).backward()
            optimizer.zero_grad()
    own_loss(model, 0).backward()
    optimizer.step()
    assert_same_on_all_ranks(model)


def short_of_memory(optimizer: Any, model: nn.Sequential, steps: int) -> None:
    """Runs out of memory in one batch, after its gradients have been exchanged, or after the step."""
    with hvd.skip_if_out_of_memory(optimizer):
        optimizer.zero_grad()
        own_loss(model, 1).backward()
        for _ in range(steps):
            optimizer.step()
        allocate()


@case(least=2)
def what_cannot_be_skipped() -> None:
    """A batch that other ranks use, and those of optimizers that keep a part of it or use it early."""
    model = network()
    optimizer = distributed(model)
    for steps in (0, 1):
        with warnings_of_this_rank() as caught, pytest.raises(RuntimeError, match="allocate memory"):
            short_of_memory(optimizer, model, steps)
        assert "so other ranks use it" in caught[0]
    with pytest.raises(ZeroDivisionError), hvd.skip_if_out_of_memory(optimizer):
        raise ZeroDivisionError
    for other in (
        sgd(network()),
        distributed(network(), compression=hvd.Compression.powersgd()),
        distributed(network(), overlap_forward=True),
        distributed(network(), deadline=60.0),
        distributed(network(), shard="state"),
        distributed(network(), op=hvd.Adasum),
    ):
        with pytest.raises(ValueError, match="skip_if_out_of_memory needs an optimizer that"):
            hvd.skip_if_out_of_memory(other)
