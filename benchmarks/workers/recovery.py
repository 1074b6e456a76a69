"""A rank of the measurement of recoveries: trains, and notes the end of each step in a file.

    python -m workers.recovery sirtaki|torchrun OPTIMIZER STEPS FILE

A line of the file is: moment, process, generation, rank, size, step. Moments are in seconds of the clock that
all processes share.
"""

from __future__ import annotations

import os
import sys
import time
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"sirtaki": with_sirtaki, "torchrun": with_torchrun}[LAUNCHER]()
