"""A network for handwritten digits as a pipeline of two stages, each of them on half of the ranks.

    hvdrun -np 4 python examples/pytorch_pipeline.py

Ranks of a row of the mesh have one stage each, and pass parts of a batch on to each other (1F1B: one forward,
one backward). Ranks of a column have the same stage and other images: DDP averages their gradients. With
2 ranks there is one row.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from digits_data import load, options_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import sirtaki.torch.backend  # noqa: F401  # registers the backend

PIXELS, HIDDEN, DIGITS = 64, 128, 10
STAGES, PARTS = 2, 4  # parts of a batch, which are in the pipeline at the same time


def make_mesh() -> DeviceMesh:
    """Arranges the ranks: neighbours are the stages of a pipeline."""
    shape = (dist.get_world_size() // STAGES, STAGES)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "stage"))


def make_stages() -> list[nn.Module]:
    torch.manual_seed(0)  # the same on every rank
    first = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
    return [first, nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIGITS))]


def make_schedule(stage: nn.Module, mesh: DeviceMesh) -> Schedule1F1B:
    """Makes this rank's part of the pipeline, whose gradients are averaged over the mesh's columns."""
    averaged = DistributedDataParallel(stage, process_group=mesh["data"].get_group())
    place, group = mesh["stage"].get_local_rank(), mesh["stage"].get_group()
    piped = PipelineStage(averaged, place, STAGES, torch.device("cpu"), group=group)
    return Schedule1F1B(piped, n_microbatches=PARTS, loss_fn=nn.functional.cross_entropy)


def train_batch(schedule: Schedule1F1B, images: Tensor, labels: Tensor, mesh: DeviceMesh) -> float | None:
    """Computes the gradients of a batch; returns its mean loss in the last stage."""
    if mesh["stage"].get_local_rank() == 0:
        schedule.step(images)
        return None
    losses: list[Tensor] = []
    schedule.step(target=labels, losses=losses)
    return torch.stack(losses).mean().item()


def accuracy(stage: nn.Module, images: Tensor, labels: Tensor, mesh: DeviceMesh) -> float | None:
    """Returns the share of images that are recognised, in the last stage."""
    group = mesh["stage"].get_group()
    with torch.no_grad():
        if mesh["stage"].get_local_rank() == 0:
            dist.send(stage(images), group=group, group_dst=1)
            return None
        hidden = torch.empty(len(images), HIDDEN)
        dist.recv(hidden, group=group, group_src=0)
        return (stage(hidden).argmax(1) == labels).double().mean().item()


def main() -> None:
    options = options_of(__doc__).parse_args()
    dist.init_process_group("sirtaki", init_method="sirtaki://")
    learn(options, make_mesh())
    dist.barrier()  # rank 0 coordinates the others' operations
    dist.destroy_process_group()


def learn(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    images, test_images, labels, test_labels = (torch.from_numpy(array) for array in load())
    images, test_images = images.flatten(1), test_images.flatten(1)
    place, parts = mesh["data"].get_local_rank(), mesh["data"].size()
    stage = make_stages()[mesh["stage"].get_local_rank()]
    schedule = make_schedule(stage, mesh)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=options.lr * parts)
    loss: float | None = None
    for epoch in range(options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(options.batch_size * parts):
            if len(batch) < options.batch_size * parts:
                continue  # all batches of a pipeline have one size
            own = batch.chunk(parts)[place]
            optimizer.zero_grad()
            loss = train_batch(schedule, images[own], labels[own], mesh)
            optimizer.step()
        share = accuracy(stage, test_images, test_labels, mesh)
        if dist.get_rank() == STAGES - 1:
            print(f"epoch {epoch + 1:2}: loss {loss:.4f}, test accuracy {share:.1%}", flush=True)


if __name__ == "__main__":
    main()
