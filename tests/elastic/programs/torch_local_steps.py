"""Trains with DiLoCo on ranks that may be lost between two synchronizations, and replays that in one process.

A fault is WORKER:STEP, counted over the whole training.

Usage: torch_local_steps.py WINDOWS [FAULT...]
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from typing import Any

import torch
from replayed import FEATURES, hold, regression, report
from torch import nn

import sirtaki.torch as hvd

WINDOWS, EVERY, SAMPLES = int(sys.argv[1]), 4, 64
WORKER = os.environ.get("SIRTAKI_WORKER", "0")
FAULTS = {tuple(fault.split(":")) for fault in sys.argv[2:]}
X, Y = map(torch.from_numpy, regression(SAMPLES))


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def inner(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def step(model: nn.Module, optimizer: Any, number: int, rank: int) -> None:
    samples = [(7 * number + 3 * rank + offset) % SAMPLES for offset in range(4)]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(X[samples]), Y[samples]).backward()
    optimizer.step()


def replay(sizes: list[int]) -> list[torch.Tensor]:
    """Returns the parameters after windows of so many ranks, in one process."""
    whole = make()
    outer = torch.optim.SGD(whole.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for window, size in enumerate(sizes):
        parts = [copy.deepcopy(whole) for _ in range(size)]
        for rank, part in enumerate(parts):
            plain = inner(part)
            for number in range(EVERY * window, EVERY * (window + 1)):
                step(part, plain, number, rank)
        for parameter, *others in zip(
            whole.parameters(), *(part.parameters() for part in parts), strict=True
        ):
            parameter.grad = parameter.detach() - torch.stack([one.detach() for one in others]).mean(0)
        outer.step()
    return list(whole.parameters())


@hvd.elastic.run
def train(state: Any) -> None:
    while state.step < WINDOWS:
        hold(state, hvd.size)
        for number in range(EVERY * state.step, EVERY * (state.step + 1)):
            if (WORKER, str(number)) in FAULTS:
                os.kill(os.getpid(), signal.SIGKILL)
            step(state.model, state.optimizer, number, hvd.rank())
        assert state.optimizer.is_synchronized
        state.sizes = [*state.sizes, hvd.size()]
        state.step += 1
        state.commit()


def main() -> None:
    hvd.init()
    model = make()
    optimizer = hvd.DiLoCo(model, inner(model), every=EVERY)
    state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])
    train(state)
    found, expected = ([one.detach() for one in some] for some in (model.parameters(), replay(state.sizes)))
    report([(0, [size]) for size in state.sizes], found, expected, hvd.size())


if __name__ == "__main__":
    main()
