"""A network for handwritten digits on a 2 x 2 mesh: tensor parallel inside, data parallel outside.

    hvdrun -np 4 python examples/pytorch_tensor_parallel.py

Ranks of a row of the mesh see the same images, and divide the layers: the first by its outputs, the second by
its inputs, so that one sum behind the pair is all that they exchange (DTensor). Ranks of a column see other
images, and divide what is left of each weight (FSDP2), so each rank stores a quarter. With 2 ranks the mesh
is 1 x 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from digits_data import load, options_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sirtaki.torch.backend  # noqa: F401  # registers the backend

PIXELS, HIDDEN, DIGITS = 64, 256, 10


def make_mesh() -> DeviceMesh:
    """Arranges the ranks: neighbours divide the layers, because they exchange more often."""
    width = min(2, dist.get_world_size())
    return init_device_mesh("cpu", (dist.get_world_size() // width, width), mesh_dim_names=("data", "tensor"))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same on every rank
    layers = [nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIGITS), nn.LogSoftmax(dim=1)]
    return nn.Sequential(*layers)


def divide(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Divides the pair of layers along both dimensions of the mesh."""
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def own_batches(
    images: Tensor, labels: Tensor, rows: int, epoch: int, mesh: DeviceMesh
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the rows of this rank's row of the mesh in each batch; what is left at the end is skipped."""
    place, parts = mesh["data"].get_local_rank(), mesh["data"].size()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(rows * parts):
        if len(batch) == rows * parts:
            own = batch.chunk(parts)[place]
            yield images[own], labels[own]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]]
) -> float:
    """Trains for an epoch; returns the loss of this rank's rows in the last step."""
    loss = torch.zeros(())
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    options = options_of(__doc__).parse_args()
    dist.init_process_group("sirtaki", init_method="sirtaki://")
    learn(options, make_mesh())
    dist.barrier()  # rank 0 coordinates the others' operations
    dist.destroy_process_group()


def learn(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    images, test_images, labels, test_labels = (torch.from_numpy(array) for array in load())
    images, test_images = images.flatten(1), test_images.flatten(1)
    model = divide(make_model(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr * mesh["data"].size())
    for epoch in range(options.epochs):
        loss = train(model, optimizer, own_batches(images, labels, options.batch_size, epoch, mesh))
        with torch.no_grad():  # all ranks take part: each has a part of the weights only
            accuracy = (model(test_images).argmax(1) == test_labels).double().mean()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {loss:.4f}, test accuracy {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()
