"""Detection of ranks that scale their losses differently, with a GradScaler each."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import sirtaki.torch as hvd
from cases import case
from cases.differing import differ
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    distributed,
    network,
    own_loss,
    sgd,
    whole_loss,
)

REMEDY = r"scaler\.load_state_dict\(hvd\.broadcast_object\(scaler\.state_dict\(\)\)\)"
LAST = r"hvd\.broadcast_object\(scaler\.state_dict\(\), root_rank=last\)"


def scaler_of(scale: float = 1024.0, tracker: int = 0) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": tracker})
    return scaler


def step(model: nn.Module, optimizer: Any, scaler: Any, number: int, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    scaler.scale(own_loss(model, number) * factor).backward()
    scaler.step(optimizer)
    scaler.update()


@case(least=2)
def a_tracker_that_one_rank_has_loaded() -> None:
    """The scales are equal until that rank doubles its own."""
    model = network()
    optimizer = distributed(model)
    scaler = scaler_of(tracker=2 if hvd.rank() == 1 else 0)
    step(model, optimizer, scaler, 0)
    differ(
        lambda: step(model, optimizer, scaler, 1), "_growth_tracker is 3 on rank 1 ", "1 on rank 0", REMEDY
    )
    assert_same_on_all_ranks(model)


@case(least=2)
def a_scale_that_one_rank_has_loaded() -> None:
    """The parameters differ after one step, and the error names the cause."""
    model = network()
    optimizer = distributed(model)
    scaler = scaler_of(scale=65536.0 if hvd.rank() == 1 else 1024.0)
    step(model, optimizer, scaler, 0)
    differ(
        lambda: step(model, optimizer, scaler, 1),
        "loss scaling differs between ranks: scale is 65536.0 on rank 1",
        "1024.0 on rank 0",
        REMEDY,
    )


@case(least=2)
def scales_that_are_too_large_at_first() -> None:
    """Overflows skip the steps in which parameters are compared."""
    model = network()
    optimizer = distributed(model)
    scaler = scaler_of(scale=65536.0 if hvd.rank() == 1 else 1024.0)
    for number in range(3):
        step(model, optimizer, scaler, number, factor=float("inf"))
    step(model, optimizer, scaler, 3)
    differ(lambda: step(model, optimizer, scaler, 4), "scale is 8192.0 on rank 1", REMEDY)


@case(least=2)
def a_state_that_one_rank_loads_later() -> None:
    model = network()
    optimizer = distributed(model)
    scaler = scaler_of()
    for number in range(6):
        step(model, optimizer, scaler, number)
    if hvd.rank() == 1:
        scaler.load_state_dict(scaler.state_dict() | {"scale": 64.0})
    differ(lambda: step(model, optimizer, scaler, 6), "scale is 64.0 on rank 1", "2048.0 on rank 0")
    assert_same_on_all_ranks(model)


@case(least=2)
def a_state_that_is_read_at_different_times() -> None:
    """The states are equal, and all of them are compared only once, though the rates change in each step."""
    model = network()
    optimizer = distributed(model)
    scaler, scale = scaler_of(), optimizer._settings.loss_scale
    compared, state = [], scale.state
    scale.state = lambda: compared.append(None) or state()
    for number in range(8):
        if number == 3 and hvd.rank() == 1:
            scaler.load_state_dict(scaler.state_dict())
        optimizer.param_groups[0]["lr"] *= 0.9
        step(model, optimizer, scaler, number)
    assert len(compared) == 1
    assert_same_on_all_ranks(model)


@case()
def a_state_that_is_broadcast() -> None:
    model, plain = network(), network()
    optimizer, reference = distributed(model), sgd(plain)
    scaler = scaler_of(tracker=3 if hvd.rank() == 0 else 0)
    scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict()))
    for number in range(6):
        step(model, optimizer, scaler, number)
        reference.zero_grad()
        whole_loss(plain, number).backward()
        reference.step()
    assert scaler.get_scale() == 4096.0
    assert_alike(model, plain)


@case(least=2)
def a_join_that_leaves_scalers_different() -> None:
    """The ranks that still had data have taken more steps."""

    def train(model: nn.Module, optimizer: Any, scaler: Any) -> int:
        for number in range(2 + hvd.rank()):
            step(model, optimizer, scaler, number)
        return hvd.join(model=model, optimizer=optimizer)

    model = network()
    optimizer, scaler = distributed(model), scaler_of()
    train(model, optimizer, scaler)
    no_other_advice = r"^(?!.*ranks that had called).*; give all ranks.* hvd\.join"
    differ(lambda: step(model, optimizer, scaler, 9), "_growth_tracker is", no_other_advice, LAST)

    model = network()
    optimizer, scaler = distributed(model), scaler_of()
    for _ in range(2):
        last = train(model, optimizer, scaler)
        scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), root_rank=last))
    for number in range(3):
        step(model, optimizer, scaler, number)
    assert_same_on_all_ranks(model)


@case(least=2)
def a_rank_that_knows_no_scaler_yet() -> None:
    """It had no data before the first join."""
    model = network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # a rank that joins must have used its GPU
    optimizer, scaler = distributed(model), scaler_of()
    for number in range(3 if hvd.rank() else 0):
        step(model, optimizer, scaler, number)
    last = hvd.join(model=model, optimizer=optimizer)
    scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), root_rank=last))
    for number in range(4):
        step(model, optimizer, scaler, number)
    assert_same_on_all_ranks(model)


@case(least=2)
def scalers_that_are_off_or_of_another_step() -> None:
    """States that a program does not use may differ."""
    model = network()
    optimizer = distributed(model)
    off = torch.amp.GradScaler("cpu", init_scale=2.0 + hvd.rank(), enabled=False)
    for number in range(3):
        step(model, optimizer, off, number)
    optimizer.zero_grad()
    own_loss(model, 4).backward()
    optimizer.step()
    assert_same_on_all_ranks(model)


@case(way=["no_sync", "two passes"])
def a_scaler_of_gradients_that_are_not_exchanged(way: str) -> None:
    """Only the rank with an overflow would skip the step."""
    model, plain = network(), network()
    optimizer = distributed(model, backward_passes_per_step=1 if way == "no_sync" else 2)
    reference, scaler = sgd(plain), scaler_of()
    for number in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync() if way == "no_sync" else contextlib.nullcontext():
            scaler.scale(own_loss(model, number)).backward()
        if number == 1 and hvd.size() > 1:
            with pytest.raises(ValueError, match=r"unscaled this rank's own .* optimizer\.synchronize\(\)"):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scaler.scale(own_loss(model, number)).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        reference.zero_grad()
        whole_loss(plain, number).backward()
        reference.step()
    assert_alike(model, plain)
    assert_same_on_all_ranks(model)
