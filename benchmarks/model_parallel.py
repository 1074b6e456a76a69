"""Measures models that are divided over two ranks, over sirtaki and over gloo.

    python benchmarks/model_parallel.py [--rounds 40] [--json FILE]

A pair of processes of one thread each over gloo, and one over sirtaki, run some training steps in turns:
`tensor parallel` divides the weights of each pair of layers (DTensor), `pipeline` gives each rank half of the
layers (1F1B). The weights that both backends lead to are compared. Each backend has processes of its own,
because torch takes two meshes of the same ranks for one, and sends everything over the first one's group.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from common.harness import Benchmark, Results
from common.jobs import KEEP_MEMORY, ROUNDS_PER_ORDER, Job, hvdrun
from common.measure import median, ratio
from common.models import difference, parts_of
from common.options import rounds
from common.report import Columns, Row, Table, Target, at_least, make_table
from common.serving import bind
from common.torch_ranks import TorchRank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sirtaki.torch as hvd
import sirtaki.torch.backend  # noqa: F401  # registers the backend

RANKS = 2
BACKENDS = ("gloo", "sirtaki")
LEAST = 1.0  # times gloo's step over sirtaki's
WIDTH, INNER, PAIRS, ROWS, PARTS = 512, 2048, 6, 64, 8
WARM_UP_ROUNDS = 3

Step = Callable[[], object]


def make_model() -> nn.Sequential:
    """Returns pairs of layers; all copies on all ranks start with equal parameters."""
    torch.manual_seed(0)
    pairs = [[nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)] for _ in range(PAIRS)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def tensor_parallel(group: Any) -> tuple[nn.Module, Step]:
    """Divides each pair of layers among the ranks of a group."""
    model, images = make_model(), batch()
    plan: dict[str, Any] = {}
    for first in range(0, 3 * PAIRS, 3):
        plan |= {str(first): ColwiseParallel(), str(first + 2): RowwiseParallel()}
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
    optimizer = sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(images), images).backward()
        optimizer.step()

    return model, step


def pipeline(group: Any) -> tuple[nn.Module, Step]:
    """Gives each rank of a group consecutive layers."""
    whole, images = make_model(), batch()
    count = len(whole) // group.size()
    stage = whole[group.rank() * count : (group.rank() + 1) * count]
    piped = PipelineStage(stage, group.rank(), group.size(), torch.device("cpu"), group=group)
    schedule = Schedule1F1B(piped, n_microbatches=PARTS, loss_fn=loss_of)
    optimizer = sgd(stage)

    def step() -> None:
        optimizer.zero_grad()
        if piped.is_first:
            schedule.step(images)
        else:
            schedule.step(target=images)
        optimizer.step()

    return stage, step


DIVISIONS = {"tensor parallel": tensor_parallel, "pipeline": pipeline}


class DividedRank(TorchRank):
    """Training steps of divided models, over one backend."""

    def __init__(self, folder: Path, backend: str) -> None:
        super().__init__(folder)
        self.join_group(backend)
        bind(self.number, self.size)

    def prepare(self, division: str) -> dict[str, str]:
        """Divides the model."""
        self._model, self._step = DIVISIONS[division](dist.group.WORLD)
        self.rounds(WARM_UP_ROUNDS)
        return {"model": f"{PAIRS} × Linear({WIDTH}, {INNER}) and back, batch {ROWS}"}

    def rounds(self, count: int) -> dict[str, Any]:
        """Runs some steps. Returns their times in ms, and the number of operations of sirtaki in them."""
        times, operations = [], 0
        for _ in range(count):
            hvd.barrier()
            before, start = hvd.stats()["operations"], time.perf_counter()
            self._step()
            times.append((time.perf_counter() - start) * 1e3)
            operations += hvd.stats()["operations"] - before
        return {"times": times, "operations": operations}

    def keep(self, path: str) -> None:
        """Writes this rank's parts of the weights to a file."""
        torch.save(parts_of(self._model), f"{path}.{hvd.rank()}")

    def deviation(self, path: str) -> float:
        """Returns how far this rank's parts of the weights have diverged from those of a file."""
        return difference([parts_of(self._model), torch.load(f"{path}.{hvd.rank()}")])


COLUMNS: Columns = {
    "division": "{division}",
    "model": "{model}",
    "gloo, ms": lambda row: f"{median(row['times']['gloo']):.2f}",
    "sirtaki, ms": lambda row: f"{median(row['times']['sirtaki']):.2f}",
    "gloo / sirtaki (95 %)": lambda row: f"{ratio(row['times']['gloo'], row['times']['sirtaki']):.2f}",
}


def measure(options: Namespace) -> Results:
    """Runs everything. Times in milliseconds, of the rank that took longer."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        jobs = {
            backend: stack.enter_context(
                Job(hvdrun(RANKS), RANKS, DividedRank, backend, settings=KEEP_MEMORY)
            )
            for backend in BACKENDS
        }
        divisions = [measure_division(jobs, one, options.rounds, f"{folder}/{one}") for one in DIVISIONS]
        return {"versions": jobs["sirtaki"].ask("versions")[0], "divisions": divisions}


def measure_division(jobs: Mapping[str, Job], division: str, rounds: int, file: str) -> Row:
    """Times the steps of both jobs in turns; the weights meet in a file."""
    facts = [job.ask("prepare", division=division)[0] for job in jobs.values()]
    times: dict[str, list[float]] = {backend: [] for backend in jobs}
    orders = range(0, rounds, ROUNDS_PER_ORDER)
    for order in orders:
        for backend in list(jobs)[:: 1 if order // ROUNDS_PER_ORDER % 2 else -1]:
            ranks = jobs[backend].ask("rounds", count=ROUNDS_PER_ORDER)
            times[backend] += map(max, *(rank["times"] for rank in ranks))
            if any(bool(rank["operations"]) != (backend == "sirtaki") for rank in ranks):
                raise SystemExit(f"{division}: the steps over {backend} exchange over another backend")
    jobs["gloo"].ask("keep", path=file)
    deviation = jobs["sirtaki"].deviation(division, path=file)
    return {"division": division, **facts[0], "deviation": deviation, "times": times}


def tables(results: Results) -> list[Table]:
    title = f"Training step of a divided model, {RANKS} ranks, one thread each"
    return [make_table(title, COLUMNS, results["divisions"], text_columns=2)]


def judge(results: Results) -> list[Target]:
    targets = []
    for one in results["divisions"]:
        speed = median(one["times"]["gloo"]) / median(one["times"]["sirtaki"])
        targets.append(at_least(f"step, gloo / sirtaki, {one['division']}", LEAST, speed))
    return targets


BENCHMARK = Benchmark(__doc__, [rounds(40, "steps of each kind")], measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
