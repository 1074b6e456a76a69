"""Gradients that are sent in 8 bits, beside a simulation of the ranks with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import assert_same_on_all_ranks, generator
from cases.warned import warnings_of_this_rank
from cases.wire_formats import rounded
from sirtaki.bindings.context import current

FORMATS = ["int8", "fp8"]
Array = np.ndarray


def model() -> nn.Module:
    layer = nn.Linear(30, 40, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(40, 30, generator=generator(0)))
    return layer


def gradient(step: int, rank: int) -> torch.Tensor:
    return torch.randn(40, 30, generator=generator(10 * step + rank))


def step_with(layer: Any, optimizer: Any, step: int) -> None:
    """Takes a step whose gradient is known."""
    optimizer.zero_grad()
    (layer.weight * gradient(step, hvd.rank())).sum().backward()
    optimizer.step()


def compressing(name: str, rate: float = 0.0) -> tuple[Any, Any]:
    layer = model()
    with warnings_of_this_rank():  # ranks that share memory are tested below
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=rate), compression=getattr(hvd.Compression, name)()
        )
    return layer, optimizer


@case(least=2, name=FORMATS)
def gradients_are_rounded_and_errors_fed_back(name: str) -> None:
    layer, optimizer = compressing(name)
    ranks, is_rounded = range(hvd.size()), current().has_wire_format(0)
    residuals = [np.zeros(1200, np.float32) for _ in ranks]
    for step in range(5):
        step_with(layer, optimizer, step)
        values = [gradient(step, rank).numpy().ravel() + residuals[rank] for rank in ranks]
        expected = sum(values) / len(ranks)
        if is_rounded and step:  # the first exchange is exact
            sent = [rounded(name, one) for one in values]
            residuals = [one - part for one, part in zip(values, sent, strict=True)]
            expected = rounded(name, sum(sent) / np.float32(len(ranks)))
        found = layer.weight.grad.numpy().ravel()
        if name == "int8" or not is_rounded:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=np.abs(expected).max() / 120)
        else:  # one unit of the last of 4 digits
            np.testing.assert_allclose(found, expected, rtol=0.13, atol=1e-3)
        differing = np.abs(found - expected) > 1e-5 * np.abs(expected).max()
        assert differing.mean() < 0.02  # sums that lie on a border may round to either side
    assert_same_on_all_ranks(layer)


@case(least=2, name=FORMATS)
def nothing_is_lost_over_many_steps(name: str) -> None:
    """The sum of equal steps is that of exact gradients, up to one rounding."""
    layer, optimizer = compressing(name, rate=1.0)
    start = layer.weight.detach().clone()
    for _ in range(40):
        step_with(layer, optimizer, 0)
    mean = sum(gradient(0, rank) for rank in range(hvd.size())) / hvd.size()
    error = ((start - layer.weight.detach()) / 40 - mean).abs().max()
    assert error < 0.02 if name == "int8" else error < 0.1
    assert_same_on_all_ranks(layer)


@case(least=2, name=FORMATS)
def a_number_that_is_not_finite_is_seen_on_all_ranks(name: str) -> None:
    layer, optimizer = compressing(name)
    for step in range(3):
        step_with(layer, optimizer, step)
    before = [one.clone() for one in optimizer.compression_state_dict()["residuals"].values()]
    optimizer.zero_grad()
    wrong = gradient(3, hvd.rank())
    if hvd.rank() == 1:
        wrong[20, 3] = float("inf")
    (layer.weight * wrong).sum().backward()
    assert not layer.weight.grad.isfinite().all()
    after = optimizer.compression_state_dict()["residuals"].values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    step_with(layer, optimizer, 4)
    assert layer.weight.grad.isfinite().all()


@case(least=2)
def statistics_count_the_bytes_of_blocks() -> None:
    layer, optimizer = compressing("int8")
    for step in range(3):
        step_with(layer, optimizer, step)
    counted = hvd.stats()["compression"]
    if not current().has_wire_format(0):
        assert counted["exchanges"] == 0
        return
    share = 2 * (hvd.size() - 1) / hvd.size()
    marks = 4
    assert counted["exchanges"] == 2
    assert counted["exact_bytes"] == pytest.approx(2 * share * 4800)
    assert counted["sent_bytes"] == pytest.approx(2 * share * (1200 + 4 * 5 + marks))
    assert 0 < counted["relative_error"] < 0.02


@case(least=2)
def gradients_of_64_bits_stay_exact() -> None:
    layer = model().double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.0), compression=hvd.Compression.int8()
    )
    for step in range(3):
        step_with(layer, optimizer, step)
    expected = sum(gradient(2, rank).double() for rank in range(hvd.size())) / hvd.size()
    torch.testing.assert_close(layer.weight.grad, expected)


@case(least=2)
def ranks_that_share_memory_are_told() -> None:
    with warnings_of_this_rank() as texts:
        layer = model()
        hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.0), compression=hvd.Compression.int8()
        )
    hvd.barrier()
    if hvd.rank() == 0:
        told = any("int8 has no effect" in text for text in texts)
        assert told is not current().has_wire_format(0)
