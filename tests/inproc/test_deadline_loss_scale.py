"""Optimizers with a deadline and a GradScaler: late gradients count without the loss scale that they had."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from world import in_world, world

import sirtaki.torch as hvd

PATIENCE = 60.0
AT_ONCE: dict[str, Any] = {"deadline": 0.0, "quorum": 0.5}
ALL: dict[str, Any] = {"deadline": 60.0, "quorum": 1.0}
INFINITE = float("inf")


class Training:
    """One parameter, whose gradient in a step is a number, and a scaler that doubles its scale each step."""

    def __init__(self, fused: bool = False, **arguments: Any) -> None:
        self.weight = nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([self.weight], lr=1.0, fused=fused)
        self.optimizer = hvd.DistributedOptimizer(inner, **arguments)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=2.0, growth_interval=1)

    def backward(self, gradient: float) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale((self.weight * gradient).sum()).backward()

    def step(self, gradient: float) -> None:
        self.backward(gradient)
        self.optimizer.synchronize()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def late_for(gradients: list[float], end: str) -> list[tuple[float, float]]:
    """Trains on two ranks, and returns their weights before and after what ends it.

    Rank 1 has these gradients, and is late with all of them. Those of rank 0 are 1.
    """
    go, done = threading.Event(), threading.Event()

    def body() -> tuple[float, float]:
        training, rank = Training(**AT_ONCE), hvd.rank()
        training.step(0.0)  # compares the parameters of all ranks
        if rank == 1:
            assert go.wait(PATIENCE)
        for gradient in gradients:
            training.step(gradient if rank == 1 else 1.0)
        go.set()
        hvd.barrier()
        before = training.weight.item()
        if rank == 0 and end != "flush":  # rank 1 alone is in the last step
            assert done.wait(PATIENCE)
        if end == "step":
            training.step(0.0)
        elif end == "plain step":
            training.optimizer.zero_grad()
            training.optimizer.step()
        if rank == 1:
            done.set()
        training.optimizer.flush()
        return before, training.weight.item()

    with world(2) as ranks:
        return ranks.run(body)


@pytest.mark.parametrize("end", ["flush", "step", "plain step"])
def test_a_late_gradient_counts_once_without_its_scale(end: str) -> None:
    """The scale has changed twice since the first of them."""
    for before, after in late_for([4.0, 8.0], end):
        assert before == -2.0
        assert before - after == (6.0 if end == "flush" else 12.0)


def test_a_late_overflow_is_left_out() -> None:
    assert late_for([INFINITE], "flush") == [(-1.0, -1.0)] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(fused: bool) -> None:
    def body() -> tuple[float, float]:
        training = Training(fused, **ALL)
        for number in range(3):
            training.step(INFINITE if number == hvd.rank() == 1 else 1.0)
        return training.weight.item(), training.scaler.get_scale()

    with world(2) as ranks:
        assert ranks.run(body) == [(-2.0, 2048.0)] * 2


@pytest.mark.parametrize("order", ["unscale_ first", "no synchronize", "no synchronize, fused"])
@in_world(2)
def test_gradients_are_exchanged_before_they_are_unscaled(order: str) -> None:
    """Otherwise a rank with an overflow skips a step, whose infinite gradients others apply."""
    training = Training("fused" in order, **ALL)
    training.backward(INFINITE if hvd.rank() else 1.0)
    call = training.scaler.unscale_ if order == "unscale_ first" else training.scaler.step
    with pytest.raises(ValueError, match=r"call optimizer\.synchronize\(\) after backward\(\)"):
        call(training.optimizer)
    assert training.weight.item() == 0.0


def test_a_scaler_that_is_off_changes_nothing() -> None:
    def body() -> float:
        training = Training(**ALL)
        training.scaler = torch.amp.GradScaler("cpu", enabled=False)
        training.backward(1.0 + hvd.rank())
        training.scaler.unscale_(training.optimizer)
        training.scaler.step(training.optimizer)
        with training.optimizer.skip_synchronize():
            training.optimizer.step()
        return training.weight.item()

    with world(2) as ranks:
        assert ranks.run(body) == [-3.0] * 2
