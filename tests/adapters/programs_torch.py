"""Programs that a test starts under hvdrun: `programs_torch.py NAME FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sirtaki.torch as hvd

FOLDER = Path(sys.argv[2])


def wait_for(name: str) -> None:
    until = time.monotonic() + 60
    while not (FOLDER / name).exists():
        assert time.monotonic() < until, f"no rank has made {name}"
        time.sleep(0.01)


def start() -> tuple[nn.Module, torch.optim.Optimizer]:
    hvd.init()
    model = nn.Linear(4, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    return model, hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )


def loader_workers() -> None:
    """Forked workers of a DataLoader neither disturb the ranks nor outlive them."""
    model, optimizer = start()
    data = TensorDataset(torch.ones(40, 4) * hvd.rank(), torch.zeros(40, 2))
    for _ in range(2):
        for inputs, targets in DataLoader(data, batch_size=4, num_workers=2):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    weights = hvd.allgather(model.weight.detach().reshape(1, -1))
    assert (weights == weights[0]).all()


def compiled_model() -> None:
    """One graph, compiled by inductor: the exchange does not cut it."""
    model, optimizer = start()
    compiled = torch.compile(model, fullgraph=True)
    for step in range(3):
        optimizer.zero_grad()
        compiled(torch.full((2, 4), float(hvd.rank() + step))).sum().backward()
        mean = (hvd.size() - 1) / 2 + step
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, torch.full((2, 4), 2 * mean))
        optimizer.step()


def error_on_one_rank() -> None:
    """The others' backward passes raise with its text."""
    model, optimizer = start()
    if hvd.rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hvdrun ends the others soon; this one tells first
    for step in range(3):
        optimizer.zero_grad()
        if step == 2 and hvd.rank() == 1:
            raise ArithmeticError("no batch is left")
        try:
            model(torch.ones(1, 4)).sum().backward()
        except hvd.HorovodInternalError as error:
            (FOLDER / "seen").write_text(str(error))
            raise
        optimizer.step()


def interrupted_wait() -> None:
    """Ctrl-C ends a wait in backward(), not the exchange: dropping the gradients lets it end."""
    model, optimizer = start()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background
    if hvd.rank() == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            model(torch.ones(1, 4)).sum().backward()
        except KeyboardInterrupt:
            (FOLDER / "interrupted").touch()
    else:
        wait_for("interrupted")
        model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    model(torch.full((1, 4), float(hvd.rank()))).sum().backward()
    assert model.weight.grad is not None
    assert (model.weight.grad == 0.5).all()


globals()[sys.argv[1]]()
print(f"rank {hvd.rank()} is done")
hvd.shutdown()
