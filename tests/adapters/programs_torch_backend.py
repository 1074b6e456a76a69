"""Programs over the backend `sirtaki` of torch.distributed: `programs_torch_backend.py NAME FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sirtaki.torch as hvd
import sirtaki.torch.backend  # noqa: F401  # registers the backend
from sirtaki.common.exceptions import MismatchError, NotInitializedError, PeerLostError

FOLDER = Path(sys.argv[2])
SIZE = 2


def check_sum(group_rank: int, size: int) -> None:
    tensor = torch.full((5,), float(group_rank + 1))
    dist.all_reduce(tensor)
    assert (tensor == size * (size + 1) / 2).all(), tensor


def from_a_file(rank: int) -> None:
    """The world is made twice, from two files, and ends with the group."""
    for turn in range(2):
        path = f"file://{FOLDER}/store.{turn}"
        dist.init_process_group("sirtaki", init_method=path, rank=rank, world_size=SIZE)
        check_sum(rank, SIZE)
        assert (hvd.rank(), hvd.size()) == (rank, SIZE)
        dist.destroy_process_group()
        assert not hvd.is_initialized()


def from_one_store_twice(rank: int) -> None:
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False)
    for _ in range(2):
        dist.init_process_group("sirtaki", store=store, rank=rank, world_size=SIZE)
        check_sum(rank, SIZE)
        dist.destroy_process_group()


def shared_with_horovods_calls(rank: int) -> None:
    """hvd.init() finds the group's world, which then outlives the group."""
    dist.init_process_group("sirtaki", init_method=f"file://{FOLDER}/store", rank=rank, world_size=SIZE)
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    check_sum(rank, SIZE)
    dist.destroy_process_group()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    hvd.shutdown()
    with pytest.raises(NotInitializedError):
        hvd.rank()


def lost_rank(rank: int) -> None:
    """The works of the others fail, and name the rank; so do their futures."""
    dist.init_process_group("sirtaki", init_method=f"file://{FOLDER}/store", rank=rank, world_size=SIZE)
    check_sum(rank, SIZE)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    with pytest.raises(Exception, match="rank 1"):
        work.get_future().wait()
    with pytest.raises(PeerLostError, match="rank 1"):
        work.wait()
    with pytest.raises(PeerLostError, match="rank 1"):
        work.wait()
    assert isinstance(work.exception(), PeerLostError)
    assert not work.is_success()


def futures_of_groups_that_end(rank: int) -> None:
    """Futures fail with their world, though nobody waits for their works; those of the next one complete."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False)
    for turn, reason in enumerate(["rank 1 aborted the process group", "was shut down|has finished", ""]):
        path = f"file://{FOLDER}/store.{turn}"
        dist.init_process_group("sirtaki", init_method=path, rank=rank, world_size=SIZE)
        tensor = torch.ones(2)
        done = dist.all_reduce(tensor, async_op=True).get_future()
        done.wait()
        assert tensor.tolist() == [SIZE, SIZE]
        works = [dist.all_reduce(tensor, async_op=True)] if reason and rank == 0 else []
        left = [work.get_future() for work in works]
        threads = [thread for thread in threading.enumerate() if thread.name == "sirtaki-futures"]
        if rank == 0:
            store.set(f"open.{turn}", "")
        store.wait([f"open.{turn}"])
        if reason.endswith("group") and rank == 1:
            dist.group.WORLD.abort()
        if reason.startswith("was"):
            dist.destroy_process_group()
        for future in left:
            with pytest.raises(Exception, match=reason):
                future.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def under_torchrun() -> None:
    """The group comes first, and shares its world with hvd.init()."""
    dist.init_process_group("sirtaki")
    check_sum(dist.get_rank(), dist.get_world_size())
    hvd.init()
    assert hvd.rank() == dist.get_rank() == int(os.environ["RANK"])
    dist.destroy_process_group()
    assert hvd.size() == SIZE


def under_hvdrun() -> None:
    for _ in range(2):
        dist.init_process_group("sirtaki", init_method="sirtaki://")
        assert dist.get_backend() == "sirtaki"
        check_sum(dist.get_rank(), dist.get_world_size())
        assert hvd.rank() == dist.get_rank() == int(os.environ["SIRTAKI_RANK"])
        dist.destroy_process_group()
    assert "RANK" not in os.environ


def with_torchs_variables() -> None:
    """Torch's default finds the ranks twice, with any backend, and beside them hvd.init() as usual."""
    for turn, backend in enumerate(("sirtaki", "gloo", "sirtaki")):
        dist.init_process_group(backend)
        assert dist.get_rank() == int(os.environ["RANK"]) == int(os.environ["SIRTAKI_RANK"])
        check_sum(dist.get_rank(), dist.get_world_size())
        is_first = dist.get_rank() == 0
        dist.barrier()  # the store ends with rank 0's group
        dist.destroy_process_group()
        # torch's next store has the same port: rank 1 must not take the ending one for it.
        ended = FOLDER / f"ended.{turn}"
        if is_first:
            ended.touch()
        while not ended.exists():
            time.sleep(0.01)
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == dist_size() == hvd.size()


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def under_detail() -> None:
    """A training by DDP, and mistakes, with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    dist.init_process_group("sirtaki", init_method="sirtaki://")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(4, size, 5, 6, generator=generator, dtype=torch.float64)
    alone = trained(nn.Linear(6, 2), [one.flatten(0, 1) for one in inputs])
    together = trained(DistributedDataParallel(nn.Linear(6, 2).double()), [one[rank] for one in inputs])
    for ours, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="same model across all ranks"):
        DistributedDataParallel(nn.Linear(6, 2, bias=rank == 0))
    with pytest.raises(MismatchError, match=r"rank 0 .* shape \[3\], rank 1 .* shape \[4\]"):
        dist.all_reduce(torch.ones(3 + rank))
    with pytest.raises(MismatchError):
        dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), 0)
    group = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=group)
    check_sum(rank, size)
    dist.destroy_process_group()


def trained(net: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the parameters after a step for each batch, from equal ones at the start."""
    net.double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def spawned(rank: int, program: str) -> None:
    globals()[program](rank)


def spawn(program: str) -> list[int | None]:
    """Runs a program on new processes; returns their exit codes."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["STORE_PORT"] = str(server.port)
    context = mp.get_context("spawn")
    ranks = [context.Process(target=spawned, args=(rank, program)) for rank in range(SIZE)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


if __name__ == "__main__":
    name = sys.argv[1]
    if name.startswith(("under", "with")):
        globals()[name]()
    else:
        assert spawn(name) == ([0, -signal.SIGKILL] if name == "lost_rank" else [0] * SIZE)
    print(f"{name} is done")
