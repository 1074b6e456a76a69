"""Programs that a test starts under hvdrun: `programs_torch.py NAME,NAME... FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
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
    """The exchange does not break the graph: inductor compiles a single graph."""
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
    """The others' backward passes raise an error with its text."""
    model, optimizer = start()
    if hvd.rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hvdrun soon ends other ranks; this rank reports first
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
    """Ctrl-C ends a wait in backward(), not the exchange, which ends once the gradients are dropped."""
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


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the words follow
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def beside_ddp() -> None:
    """A model that torch's DDP or FSDP wraps is rejected, before or after DistributedOptimizer."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    hvd.init()
    store = f"file://{FOLDER / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=hvd.rank(), world_size=hvd.size())
    words = ("weight'", "averaged twice", "hvdrun")

    before = nn.Linear(4, 2)
    wrapped = DistributedDataParallel(before)
    refused(lambda: hvd.DistributedOptimizer(plain_sgd(wrapped)), "DistributedDataParallel", *words[1:])
    refused(
        lambda: hvd.DistributedOptimizer(plain_sgd(before), before.named_parameters(), op=hvd.Adasum),
        "DistributedDataParallel",
        *words,
    )

    after = nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(plain_sgd(after), after.named_parameters())
    late = DistributedDataParallel(after)
    late(torch.ones(1, 4)).sum().backward()
    refused(optimizer.step, "DistributedDataParallel", *words)

    sharded = FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"))
    refused(lambda: hvd.DistributedOptimizer(plain_sgd(sharded)), "FullyShardedDataParallel", *words[1:])
    sharded = fully_shard(nn.Linear(4, 2), mesh=torch.distributed.init_device_mesh("cpu", (hvd.size(),)))
    refused(lambda: hvd.DistributedOptimizer(plain_sgd(sharded)), "DTensor", *words[1:])

    plain = nn.Linear(4, 2)  # other models may be wrapped
    hvd.broadcast_parameters(plain.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(plain_sgd(plain), plain.named_parameters())
    plain(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.distributed.destroy_process_group()


def old_optimizers() -> None:
    """An optimizer belongs to the world in which it was made."""
    model, optimizer = start()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    hvd.shutdown()
    hvd.init()
    for call in (lambda: model(torch.ones(1, 4)).sum().backward(), optimizer.step):
        refused(call, "a world that hvd.shutdown() has ended", "hvd.DistributedOptimizer(optimizer")
    again = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert again is optimizer
    again.zero_grad()
    model(torch.full((1, 4), float(hvd.rank()))).sum().backward()
    assert model.weight.grad is not None
    assert (model.weight.grad == 0.5).all()
    again.step()

    hvd.shutdown()
    hvd.init(rank=0, size=1)
    alone = hvd.DistributedOptimizer(plain_sgd(model))
    alone.step()
    hvd.shutdown()
    alone.step()  # no other rank is concerned
    hvd.init()
    refused(alone.step, "a world that hvd.shutdown() has ended")


for name in sys.argv[1].split(","):
    globals()[name]()
    print(f"rank {hvd.rank()}: {name} is done", flush=True)
    hvd.shutdown()
