"""Compression with a memory of what is left out, beside a simulation of all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np
import pytest
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
    sgd,
    train,
)

WIDTH = 40  # of models whose matrix in the middle has enough elements for every method
Array = np.ndarray


class Simulation:
    """All ranks in one process, with float64: what is left out on each rank, and plain formulas."""

    def __init__(self, method: str, argument: Any, ranks: int) -> None:
        self.method, self.argument, self.ranks = method, argument, ranks
        self.residuals: dict[int, list[Array]] = {}
        self.bases: dict[int, Array] = {}

    def combined(self, number: int, gradients: list[Array]) -> Array:
        """Returns what all ranks get instead of the average of these gradients."""
        if not self.compresses(gradients[0]):
            return sum(gradients) / self.ranks
        before = self.residuals.get(number, [np.zeros_like(one) for one in gradients])
        values = [one + residual for one, residual in zip(gradients, before, strict=True)]
        sent, result = getattr(self, self.method)(number, values)
        self.residuals[number] = [one - part for one, part in zip(values, sent, strict=True)]
        return result

    def compresses(self, gradient: Array) -> bool:
        if self.method != "powersgd":
            return gradient.size >= 1024
        rows, columns = gradient.shape[0], gradient.size // gradient.shape[0]
        return gradient.ndim > 1 and self.argument * (rows + columns) < rows * columns

    def powersgd(self, number: int, values: list[Array]) -> tuple[list[Array], Array]:
        matrices = [one.reshape(len(one), -1) for one in values]
        if number not in self.bases:
            shape = self.argument, matrices[0].shape[1]
            source = torch.Generator().manual_seed(number)
            self.bases[number] = torch.randn(shape, generator=source, dtype=torch.float64).numpy().T
        mean = sum(matrices) / self.ranks
        left, _ = np.linalg.qr(mean @ self.bases[number])
        self.bases[number] = mean.T @ left
        shape = values[0].shape
        sent = [(left @ (left.T @ one)).reshape(shape) for one in matrices]
        return sent, (left @ (left.T @ mean)).reshape(shape)

    def topk(self, number: int, values: list[Array]) -> tuple[list[Array], Array]:
        sent = []
        for one in values:
            flat, kept = one.reshape(-1), np.zeros(one.size)
            largest = np.argsort(-abs(flat))[: ceil(self.argument * one.size)]
            kept[largest] = flat[largest]
            sent.append(kept.reshape(one.shape))
        return sent, sum(sent) / self.ranks

    def onebit(self, number: int, values: list[Array]) -> tuple[list[Array], Array]:
        sent = [np.where(one >= 0, 1.0, -1.0) * abs(one).mean() for one in values]
        return sent, sum(sent) / self.ranks


METHODS = {
    "powersgd of rank 1": ("powersgd", 1),
    "powersgd of rank 4": ("powersgd", 4),
    "topk": ("topk", 0.05),
    "onebit": ("onebit", None),
}


def compression(name: str, start: int = 0) -> Any:
    method, argument = METHODS[name]
    make = getattr(hvd.Compression, method)
    return make(start=start) if argument is None else make(argument, start=start)


def simulation(name: str, ranks: int = 0) -> Simulation:
    return Simulation(*METHODS[name], ranks or hvd.size())


def loss_of_rank(model: nn.Module, step: int, rank: int, ranks: int) -> Tensor:
    inputs, targets = (whole.chunk(ranks)[rank] for whole in batch(step))
    return loss_of(model, (inputs, targets))


def simulated_step(
    model: nn.Module, optimizer: Any, simulated: Simulation, losses: list[Callable[[], Tensor]], exact: bool
) -> None:
    """Takes a step with the gradients of each rank's loss."""
    found: list[list[Array]] = []
    for loss in losses:
        optimizer.zero_grad()
        loss().backward()
        found.append([one.grad.numpy().copy() for one in model.parameters()])
    for number, parameter in enumerate(model.parameters()):
        gradients = [of_rank[number] for of_rank in found]
        mean = sum(gradients) / len(gradients)
        parameter.grad.copy_(torch.from_numpy(mean if exact else simulated.combined(number, gradients)))
    optimizer.step()


def simulate(
    model: nn.Module, optimizer: Any, simulated: Simulation, steps: range, start: int = 1, scale: float = 1.0
) -> None:
    ranks = simulated.ranks
    for step in steps:
        losses = [
            lambda step=step, rank=rank: scale * loss_of_rank(model, step, rank, ranks)
            for rank in range(ranks)
        ]
        simulated_step(model, optimizer, simulated, losses, exact=step < start)


@case(least=2, name=METHODS)
def training_is_the_simulated_one(name: str) -> None:
    model, plain = network(width=WIDTH), network(width=WIDTH)
    train(model, distributed(model, compression=compression(name, start=3)), own_loss, steps=8)
    simulate(plain, sgd(plain), simulation(name), range(8), start=3)
    assert_alike(model, plain)
    assert_same_on_all_ranks(model)


@case(least=2)
def without_error_feedback_nothing_is_left() -> None:
    model = network(width=WIDTH)
    optimizer = distributed(model, compression=hvd.Compression.topk(0.1, start=0, error_feedback=False))
    train(model, optimizer, own_loss, steps=3)
    assert optimizer.compression_state_dict()["residuals"] == {}
    assert_same_on_all_ranks(model)


@case(least=2)
def statistics_of_what_is_sent() -> None:
    before = hvd.stats()["compression"]
    assert before == {"exchanges": 0, "exact_bytes": 0, "sent_bytes": 0, "relative_error": 0.0}
    model = network(width=WIDTH)
    optimizer = distributed(model, compression=compression("onebit"))
    train(model, optimizer, own_loss, steps=4)
    found, n = hvd.stats()["compression"], hvd.size()
    assert found["exchanges"] == 3
    elements = WIDTH * WIDTH
    assert found["exact_bytes"] == round(3 * 2 * (n - 1) / n * 8 * elements)
    assert found["sent_bytes"] == 3 * (n - 1) * (8 + 8 + elements // 8)  # a mark, the scale, the signs
    assert 0.1 < found["relative_error"] < 1


@case(least=2)
def different_compressions_are_named() -> None:
    model = network(width=WIDTH)
    mine = hvd.Compression.powersgd(1 + hvd.rank(), start=0)
    optimizer = distributed(model, compression=mine)
    with pytest.raises(ValueError, match=r"different compressions, this one PowerSGD\(start=0"):
        train(model, optimizer, own_loss, steps=1)
    hvd.barrier()


@case()
def arguments_that_are_refused() -> None:
    kinds = hvd.Compression
    for wrong in (
        lambda: kinds.powersgd(0),
        lambda: kinds.powersgd(2.0),
        lambda: kinds.topk(1.0),
        lambda: kinds.topk(0),
        lambda: kinds.onebit(start=-1),
        lambda: kinds.onebit(start=1.5),
    ):
        with pytest.raises(ValueError, match="has to"):
            wrong()
    model = network()
    for options, text in (
        ({"compression": kinds.powersgd}, "PowerSGD: call it"),
        ({"compression": kinds.onebit(), "op": hvd.Max}, r"needs op=hvd.Average or op=hvd.Sum"),
        ({"compression": kinds.onebit(), "op": hvd.Adasum}, r"needs op=hvd.Average or op=hvd.Sum"),
        ({"compression": kinds.topk(0.1), "groups": 2}, "groups have no meaning"),
    ):
        with pytest.raises(ValueError, match=text):
            distributed(model, **options)
    with pytest.raises(ValueError, match=r"give it to hvd.DistributedOptimizer"):
        hvd.allreduce(torch.ones(3), compression=kinds.powersgd())
    optimizer = distributed(model)
    with pytest.raises(ValueError, match="remembers nothing"):
        optimizer.compression_state_dict()
    compressed = distributed(network(), compression=kinds.onebit())
    state = compressed.compression_state_dict()
    with pytest.raises(ValueError, match="the same compression"):
        distributed(network(), compression=kinds.powersgd()).load_compression_state_dict(state)
    state["residuals"] = {0: torch.ones(7)}
    with pytest.raises(ValueError, match="does not fit"):
        compressed.load_compression_state_dict(state)
