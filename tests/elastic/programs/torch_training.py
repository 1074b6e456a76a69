"""Trains a small network of torch on ranks that may be lost, and checks itself against one process.

Each rank takes its samples from an ElasticSampler; the state records which samples the ranks processed in
each step. A fault is WORKER:PLACE:STEP, where the place is "step", "exchanged" or "written".

The environment may ask for overlap_forward (OVERLAP), for a division of the optimizer's state (SHARD), and
for a commit in EVERY steps instead of each.

Usage: torch_training.py SAMPLES [FAULT...]
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from replayed import FEATURES, Steps, hold, pace, pause, regression, report
from torch import nn

import sirtaki.torch as hvd

SAMPLES = int(sys.argv[1])
WORKER = os.environ.get("SIRTAKI_WORKER", "0")
OVERLAP, EVERY = "OVERLAP" in os.environ, int(os.environ.get("EVERY", "1"))
FAULTS = {tuple(fault.split(":")) for fault in sys.argv[2:]}
X, Y = map(torch.from_numpy, regression(SAMPLES))


def fail_if_planned(place: str, step: int) -> None:
    if (WORKER, place, str(step)) in FAULTS:
        os.kill(os.getpid(), signal.SIGKILL)


def make() -> tuple[nn.Module, Any, Any]:
    """Returns a model, its optimizer and a scheduler, the same in every process."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)


def replay(steps: Steps) -> list[torch.Tensor]:
    """Returns the parameters after these steps in one process."""
    model, optimizer, scheduler = make()
    for _, samples in steps:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X[samples]), Y[samples]).backward()
        optimizer.step()
        scheduler.step()
    return list(model.parameters())


@hvd.elastic.run
def train(state: Any) -> None:
    while len(state.sampler.processed_indices) < SAMPLES:
        for batch, index in enumerate(state.sampler):
            hold(state, hvd.size)
            samples = hvd.allgather(torch.tensor([index]), name="samples").tolist()
            fail_if_planned("step", state.step)
            state.optimizer.zero_grad()
            nn.functional.mse_loss(state.model(X[index : index + 1]), Y[index : index + 1]).backward()
            fail_if_planned("exchanged", state.step)
            state.optimizer.step()
            state.scheduler.step()
            fail_if_planned("written", state.step)
            state.sampler.record_batch(batch, 1)
            state.steps = [*state.steps, (0, samples)]
            state.step += 1
            pause()
            if state.step % EVERY == 0:
                state.commit()
            pace(state.step)


def main() -> None:
    hvd.init()
    model, optimizer, scheduler = make()
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
    shard = os.environ.get("SHARD")
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), overlap_forward=OVERLAP, shard=shard
    )
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, step=0, steps=[]
    )
    train(state)
    found, expected = ([one.detach() for one in some] for some in (model.parameters(), replay(state.steps)))
    report(state.steps, found, expected, hvd.size())


if __name__ == "__main__":
    main()
