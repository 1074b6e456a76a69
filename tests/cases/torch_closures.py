"""Optimizers that step with a closure, and decide by its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    batch,
    distributed,
    loss_of,
    network,
    own_loss,
    share,
    whole_loss,
)


def searching(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        model.parameters(), lr=0.8, max_iter=8, **{"line_search_fn": "strong_wolfe", **options}
    )


def minimise(
    model: nn.Module, optimizer: Any, loss: Callable[[nn.Module], Tensor], steps: int = 3
) -> list[Any]:
    """Takes steps; returns the losses that they have returned, and the number of calls of the closure."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    losses = [optimizer.step(closure) for _ in range(steps)]
    return [float(one.detach()) for one in losses] + [optimizer.state[model[0].weight]["func_evals"]]


def assert_as_one_process(
    own: Callable[[nn.Module], Tensor], whole: Callable[[nn.Module], Tensor], op: int, **options: Any
) -> None:
    ours, reference = network(), network()
    found = minimise(ours, distributed(ours, searching(ours, **options), op=op), own)
    expected = minimise(reference, searching(reference, **options), whole)
    assert found[-1] == expected[-1]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-6, atol=1e-8)
    assert_same_on_all_ranks(ours)


@case(op=["Average", "Sum"])
def a_line_search_as_in_one_process(op: str) -> None:
    """Each rank's own loss would lead it to another length of the step."""
    factor = hvd.size() if op == "Sum" else 1
    assert_as_one_process(
        lambda model: own_loss(model, 0), lambda model: factor * whole_loss(model, 0), getattr(hvd, op)
    )


@case()
def an_end_without_progress_as_in_one_process() -> None:
    """Without a line search, LBFGS stops when the loss hardly changes: at once with an easy batch."""

    def loss(model: nn.Module, of: Callable[[Tensor], Tensor]) -> Tensor:
        inputs, targets = batch(0)
        easy = torch.zeros(inputs.shape[0], 1, dtype=torch.float64)
        easy[-1] = 12.0
        return (of(easy) * (model(of(inputs)) - of(targets)).square()).mean()

    assert_as_one_process(
        lambda model: loss(model, share),
        lambda model: loss(model, lambda whole: whole),
        hvd.Average,
        line_search_fn=None,
        tolerance_change=1e-3,
    )


@case()
def a_line_search_with_unequal_rows() -> None:
    """A rank's loss counts by its rows; with more ranks than rows, one has no loss."""
    for rows in (2, 7):
        inputs, targets = batch(1, rows)
        ours, reference = network(), network()
        optimizer = distributed(ours, searching(ours))

        @hvd.consistent(batch=["inputs", "targets"])
        def step(
            inputs: Tensor, targets: Tensor, model: nn.Module = ours, optimizer: Any = optimizer
        ) -> None:
            minimise(model, optimizer, lambda model: loss_of(model, (inputs, targets)), steps=1)

        step(inputs, targets)
        minimise(reference, searching(reference), lambda model: loss_of(model, (inputs, targets)), steps=1)  # noqa: B023
        assert_alike(ours, reference)


@case(kind=["float", "float32", "array"])
def a_loss_that_is_a_number(kind: str) -> None:
    convert: Callable[[float], Any] = {"float": float, "float32": np.float32, "array": np.array}[kind]
    model = network()
    optimizer = distributed(model, searching(model))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = own_loss(model, 0)
        loss.backward()
        return convert(loss.item())

    expected = float(whole_loss(model, 0).detach())
    returned = optimizer.step(closure)
    assert isinstance(returned, float) or hvd.size() == 1
    assert abs(returned - expected) < (1e-6 if kind == "float32" else 1e-12)
    assert_same_on_all_ranks(model)
