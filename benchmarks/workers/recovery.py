"""A rank of the measurement of recoveries: trains, and notes the end of each step in a file.

    python -m workers.recovery sirtaki|torchrun|torchft OPTIMIZER STEPS FILE

A line of the file is: moment, process, generation, rank, size, step. Moments are in seconds of the clock that
all processes share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from common.models import large_linear

LAUNCHER, OPTIMIZER, STEPS, FILE = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]


def make() -> tuple[Any, Any, Any]:
    """Returns the step, the model of 25 M parameters, and its optimizer."""
    torch.manual_seed(0)
    step = large_linear()
    model = step.make_model()
    kind: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[OPTIMIZER]
    return step, model, kind(model.parameters(), lr=1e-4)


def note(generation: int, rank: int, size: int, number: int) -> None:
    line = f"{time.monotonic()} {os.getpid()} {generation} {rank} {size} {number}\n"
    file = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())  # one write, which other processes do not interleave
    os.close(file)


def broadcast_bandwidth() -> float:
    """Returns the bytes per second at which all ranks get a tensor of rank 0; collective."""
    import sirtaki.torch as hvd

    tensor = torch.zeros(1 << 24)
    seconds = []
    for _ in range(5):
        before = time.monotonic()
        hvd.broadcast_(tensor, root_rank=0)
        seconds.append(time.monotonic() - before)
    return tensor.nbytes / min(seconds)


def with_sirtaki() -> None:
    import sirtaki.torch as hvd

    hvd.init()
    step, model, optimizer = make()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        generation = hvd.stats()["changes"][-1]["generation"]
        while state.step < STEPS:
            step.train(model, optimizer)
            state.step += 1
            before = time.monotonic()
            state.commit()
            state.commits += time.monotonic() - before
            note(generation, hvd.rank(), hvd.size(), state.step)

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, commits=0.0)
    train(state)
    for change in hvd.stats()["changes"]:
        phases = [change[f"{phase}_seconds"] for phase in ("agree", "rebuild", "state")]
        print("PHASES", change["generation"], *phases, flush=True)
    print("COMMIT", state.commits / state.step, flush=True)
    print("BANDWIDTH", broadcast_bandwidth(), flush=True)


def with_torchrun() -> None:
    """Starts from the beginning after each restart: the cost of checkpoints is not counted."""
    import torch.distributed as dist

    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    # Separates the attempts: the default store of torch 2.13 keeps the addresses of ended processes.
    own = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(
        "gloo", store=own, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    step, model, optimizer = make()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    generation = int(attempt) + 1
    for number in range(STEPS):
        step.train(parallel, optimizer)
        note(generation, dist.get_rank(), dist.get_world_size(), number)
    dist.destroy_process_group()


def torchft_manager(store: Any, model: Any, optimizer: Any) -> Any:
    """Returns the manager of a replica group that is this process; the store has to outlive it."""
    from torchft import Manager, ProcessGroupGloo

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    settings = json.loads(os.environ["TORCHFT_SETTINGS"])
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(milliseconds=settings["gloo_timeout_ms"])),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        heartbeat_interval=timedelta(milliseconds=settings["heartbeat_interval_ms"]),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"group_{os.environ['REPLICA_GROUP_ID']}",
    )


def with_torchft() -> None:
    """Notes the steps whose optimizer has run, on the ranks whose gradients took part.

    Each gradient is reduced as soon as it is there. DistributedDataParallel of torchft 0.2.0 cannot be used:
    its hook raises an AssertionError on the survivors when an all-reduce fails, which ends them.
    """
    import torch.distributed as dist

    step, model, optimizer = make()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft_manager(store, model, optimizer)
    works: list[Any] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda it: works.append(manager.allreduce(it.grad)))
    while manager.current_step() < STEPS:
        manager.start_quorum()
        optimizer.zero_grad()
        step.loss(model).backward()
        for work in works:
            work.wait()
        works.clear()
        has_part = manager.is_participating()
        if manager.should_commit():
            optimizer.step()
            if has_part:
                size, rank = manager.num_participants(), manager.participating_rank()
                note(manager._quorum_id, rank, size, manager.current_step())


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"sirtaki": with_sirtaki, "torchrun": with_torchrun, "torchft": with_torchft}[LAUNCHER]()
