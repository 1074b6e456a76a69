"""Programs of a library that imports horovod: `hvdrun --as-horovod python programs_as_horovod.py NAME...`."""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch


def collectives(local_rank: int) -> None:
    """Covers each operation of ignite's model of Horovod."""
    rank, size = idist.get_rank(), idist.get_world_size()
    assert (local_rank, size, idist.backend(), idist.get_nnodes()) == (rank, 2, "horovod", 1)
    mine = torch.tensor([rank + 1.0, 5.0 - rank])
    expected = {
        "SUM": [3.0, 9.0],
        "AVERAGE": [1.5, 4.5],
        "MIN": [1.0, 4.0],
        "MAX": [2.0, 5.0],
        "PRODUCT": [2.0, 20.0],
    }
    for op, values in expected.items():
        assert idist.all_reduce(mine.clone(), op).tolist() == values, op
    assert idist.all_reduce(rank + 1.0) == 3.0
    assert idist.all_gather(torch.tensor([rank])).tolist() == [0, 1]
    assert idist.all_gather(rank + 0.5) == [0.5, 1.5]
    assert idist.all_gather(f"rank {rank}") == ["rank 0", "rank 1"]
    assert idist.broadcast(mine, src=1).tolist() == [2.0, 4.0]
    assert idist.broadcast(f"rank {rank}", src=1) == "rank 1"
    idist.barrier()
    print("collectives: as expected", flush=True)


def training(local_rank: int) -> None:
    """The ranks together do what one process does with the whole batch."""
    inputs = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)

    def start(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Linear(3, 1, dtype=torch.float64)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> None:
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()

    model = idist.auto_model(start(idist.get_rank()))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    train(model, optimizer, slice(idist.get_rank(), None, idist.get_world_size()))
    alone = start(0)
    train(alone, torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9), slice(None))
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    print("training: as expected", flush=True)


if __name__ == "__main__":
    with idist.Parallel(backend="horovod") as parallel:
        for name in sys.argv[1:]:
            parallel.run(globals()[name])
