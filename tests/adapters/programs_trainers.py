"""Trainings by trainers that stand on torch.distributed: `programs_trainers.py NAME FOLDER`."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import sirtaki.torch.backend  # noqa: F401  # registers the backend

FOLDER = Path(sys.argv[2])
OPTIONS = {"epochs": 1, "lr": 0.002, "batch_size": 32}
SIZE = 2

# The destructor of gloo's groups holds the interpreter's lock while it waits for a thread that may need it.
_never_destroyed: list[Any] = []


def weights_of(train: Callable[[str], nn.Module], backend: str) -> dict[str, torch.Tensor]:
    """Trains over a backend; returns the weights, which are the same on all ranks."""
    model = train(backend)
    assert (dist.get_backend(), dist.get_world_size()) == (backend, SIZE)
    everyone: list[Any] = [None] * SIZE
    dist.all_gather_object(everyone, model.state_dict())
    for other in everyone:
        for name, value in model.state_dict().items():
            assert torch.equal(other[name], value), name
    if backend == "gloo":
        _never_destroyed.append(dist.group.WORLD)
    dist.destroy_process_group()
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def compare(train: Callable[[str], nn.Module]) -> None:
    """Asserts that a training over sirtaki ends with the bits of one over gloo, for two ranks."""
    theirs, ours = weights_of(train, "gloo"), weights_of(train, "sirtaki")
    assert theirs.keys() == ours.keys() != set()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def example(name: str) -> Any:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module(name)


def lightning() -> None:
    module = example("lightning_digits")
    compare(lambda backend: module.train(backend, **OPTIONS)[0])


def transformers() -> None:
    module = example("transformers_digits")
    compare(lambda backend: module.train(backend, **OPTIONS)[0])


def accelerate() -> None:
    compare(trained_by_accelerate)


def trained_by_accelerate(backend: str) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.process_index) == (SIZE, dist.get_rank())
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randn(64, 1, generator=generator))
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapped, optimizer, batches = accelerator.prepare(net, optimizer, DataLoader(data, 8))
    assert isinstance(wrapped, DistributedDataParallel)
    assert len(batches) == 64 // 8 // SIZE
    for inputs, targets in batches:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(wrapped(inputs), targets))
        optimizer.step()
    ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
    assert ranks.tolist() == list(range(SIZE))
    accelerator.wait_for_everyone()
    return net


def unchanged() -> None:
    """Without torch's variables a trainer sees one process, although the ranks of hvdrun form a world."""
    # Lightning then starts MPI, where it is installed, in each rank. Processes of Open MPI that start and end
    # at the same time remove the folder of a user and host under each other.
    own = tempfile.TemporaryDirectory(prefix="ompi-")
    os.environ["TMPDIR"] = own.name
    import lightning as pl
    from transformers import TrainingArguments
    from transformers.training_args import ParallelMode

    import sirtaki.torch as hvd

    hvd.init()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & os.environ.keys()
    arguments = TrainingArguments(output_dir=str(FOLDER), use_cpu=True)
    assert (arguments.parallel_mode, arguments.world_size) == (ParallelMode.NOT_PARALLEL, 1)
    assert pl.Trainer(accelerator="cpu", devices=1, logger=False).world_size == 1
    model, _ = example("transformers_digits").train(**OPTIONS)
    assert not dist.is_initialized()
    torch.save(model.state_dict(), FOLDER / f"{hvd.size()}.{hvd.rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    print("is done")
