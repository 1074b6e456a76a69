"""The examples of model parallelism beside the undivided models: `programs_model_parallel.py NAME...`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pytorch_pipeline as pipeline
import pytorch_tensor_parallel as tensor_parallel
from digits_data import load

ROWS, STEPS, MANY_STEPS = 16, 20, 1000
LIMIT = 1e-10


def digits() -> tuple[Tensor, Tensor]:
    images, _, labels, _ = load()
    return torch.from_numpy(images).flatten(1).double(), torch.from_numpy(labels)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def batches(parts: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields whole batches, in the order of the examples."""
    images, labels = digits()
    for step in range(steps):
        epoch, place = divmod(step, len(images) // (ROWS * parts))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        batch = order.split(ROWS * parts)[place]
        yield images[batch], labels[batch]


def train_undivided(model: nn.Module, parts: int, steps: int) -> nn.Module:
    """Trains a whole model in one process; its last layer may be the logarithm of a softmax, too."""
    optimizer = sgd(model)
    for images, labels in batches(parts, steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def compare(found: Any, expected: Any) -> None:
    """Asserts that parameters are those of the undivided model."""
    pairs = list(zip(found, expected, strict=True))
    assert pairs
    for one, other in pairs:
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        difference = (whole - other).abs().max().item()
        assert difference < LIMIT, difference


def divided_layers() -> None:
    """Trains for an epoch on a mesh; each rank stores its part of the weights only."""
    mesh = tensor_parallel.make_mesh()
    parts = mesh["data"].size()
    images, labels = digits()
    model = tensor_parallel.divide(tensor_parallel.make_model().double(), mesh)
    stored = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = tensor_parallel.make_model().double()
    count = sum(parameter.numel() for parameter in whole.parameters())
    assert stored < 1.05 * count / dist.get_world_size()
    own = tensor_parallel.own_batches(images, labels, ROWS, 0, mesh)
    tensor_parallel.train(model, sgd(model), own)
    train_undivided(whole, parts, len(images) // (ROWS * parts))
    compare(model.parameters(), whole.parameters())


def train_in_stages(steps: int) -> list[float]:
    """Trains a pipeline, compares this rank's stage with the undivided model, and returns its losses."""
    mesh = pipeline.make_mesh()
    place, parts = mesh["data"].get_local_rank(), mesh["data"].size()
    stage = pipeline.make_stages()[mesh["stage"].get_local_rank()].double()
    schedule, optimizer = pipeline.make_schedule(stage, mesh), sgd(stage)
    losses = []
    for images, labels in batches(parts, steps):
        optimizer.zero_grad()
        own = images.chunk(parts)[place], labels.chunk(parts)[place]
        losses.append(pipeline.train_batch(schedule, *own, mesh))
        optimizer.step()
    whole = nn.ModuleList(pipeline.make_stages()).double()
    train_undivided(nn.Sequential(*whole), parts, steps)
    compare(stage.parameters(), whole[mesh["stage"].get_local_rank()].parameters())
    return [loss for loss in losses if loss is not None]


def stages() -> None:
    losses = train_in_stages(STEPS)
    assert len(losses) == (STEPS if dist.get_rank() % 2 else 0)


def many_steps_of_stages() -> None:
    losses = train_in_stages(MANY_STEPS)
    assert not losses or losses[-1] < losses[0] / 10


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        dist.init_process_group("sirtaki", init_method="sirtaki://")
        globals()[name]()
        dist.barrier()
        dist.destroy_process_group()
        print(f"{name} is done", flush=True)


if __name__ == "__main__":
    main()
