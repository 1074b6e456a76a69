"""Models, data and single-process references for the torch cases. All ranks make equal ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from sirtaki.torch.training.exchange import Overlap

ROWS = 12  # of the whole batch: 1, 2, 3 and 4 ranks share it evenly
CLOSE = {"rtol": 1e-10, "atol": 1e-12}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.05),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["SGD"](model.parameters())


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Sets small random weights, from a generator of its own: ranks may be threads."""
    source = generator(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5  # for every width, tanh is not saturated
            parameter.copy_(torch.randn(parameter.shape, generator=source, dtype=torch.float64) * spread)
    return model


def network(seed: int = 0, width: int = 5) -> nn.Module:
    layers = nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    )
    return fill(layers.double(), seed)


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Returns the whole batch of a step."""
    source = generator(1000 + step)
    inputs = torch.randn(rows, 4, generator=source, dtype=torch.float64)
    return inputs, torch.randn(rows, 3, generator=source, dtype=torch.float64)


def share(whole: Tensor) -> Tensor:
    """Returns this rank's part of a batch."""
    return whole.chunk(hvd.size())[hvd.rank()]


def loss_of(model: Callable[[Tensor], Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def own_loss(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    """Returns the loss of this rank's part of a step's batch."""
    inputs, targets = batch(step)
    return loss_of(model, (share(inputs), share(targets)))


def whole_loss(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    return loss_of(model, batch(step))


def as_compiled(model: nn.Module, **options: Any) -> Any:
    """Compiles a model; the limit applies to the whole process, in which the tests of many worlds run."""
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 100_000
    return torch.compile(model, **options)


def train(
    model: nn.Module, optimizer: Any, loss: Callable[[nn.Module, int], Tensor], steps: int = 5
) -> nn.Module:
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return model


def distributed(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer or sgd(model), model.named_parameters(), **options)


def leaving_early(optimizer: Any, is_early: bool = True) -> Any:
    """Makes the optimizer submit gradients as on a machine with a spare core, or without; returns it."""
    optimizer._reducer._overlap = Overlap(
        has_spare_core=is_early, wish=lambda: "auto" if is_early else "late"
    )
    return optimizer


def assert_alike(actual: nn.Module, expected: nn.Module) -> None:
    """Checks that parameters are equal up to the rounding of float64."""
    for (name, one), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        text = f"{name}: "
        torch.testing.assert_close(
            one.detach(), other.detach(), **CLOSE, msg=lambda why, text=text: text + why
        )


def assert_trains_as_one_process(
    run: Callable[[Any, Any, Callable[..., Tensor]], Any],
    build: Callable[[], nn.Module] = network,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> None:
    """Compares a training of all ranks, each with its part of the batches, with one of the whole batches.

    `run` receives the model, its optimizer and the loss to train with, as `train` does.
    """
    ours, reference = build(), build()
    run(ours, distributed(ours, optimizer(ours), **options), own_loss)
    run(reference, optimizer(reference), whole_loss)
    assert_alike(ours, reference)
    assert_same_on_all_ranks(ours)


def assert_same_on_all_ranks(model: nn.Module) -> None:
    """Checks that parameters are equal to the bit on all ranks."""
    states = hvd.allgather_object([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
    assert all(state == states[0] for state in states)
