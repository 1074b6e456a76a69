"""Compares operations on GPUs with plain NCCL, and a training step with DDP's, with one rank per GPU.

    python benchmarks/nccl.py [-np 2] [--sizes 1K 64K 1M 64M] [--rounds 11] [--json FILE]

The peer is torch.distributed's "nccl", in the same processes. They take turns in blocks of calls, and each
call is timed until the GPU is done with it. A ratio is the median of those of adjacent blocks. By default
each GPU has a rank. With one GPU, both use a communicator of one rank, which shows their own costs.
`--try-on-cpu` tries the benchmark where there is no GPU, beside gloo: its figures say nothing of GPUs.
"""

from __future__ import annotations

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import alternate, median, ratio
from common.models import MODELS, Step, deviation
from common.options import KIB, MIB, Option, choice, number, rounds, sizes
from common.peer_jobs import Rank, latency_tables, make_rows
from common.report import Columns, Row, Table, make_table
from torch import nn

import sirtaki.torch as hvd
from sirtaki.bench.torch_implementations import TorchDistributed, TorchSirtaki

SIZES = [KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
OPERATIONS = ["allreduce", "broadcast", "allgather", "reducescatter", "alltoall"]
BASELINE = {"nccl": "sirtaki", "gloo": "sirtaki"}
CALLS = 20  # per block
STEPS = 10  # per round
LEARNING_RATE = 0.01
WARM_UP = 5


class GpuRank(Rank):
    """One GPU, or the CPU: each operation through sirtaki and through the peer."""

    def __init__(self, _: Path, kind: str) -> None:
        hvd.init()
        self._device, backend = torch.device("cpu"), "gloo"
        if kind == "cuda":
            self._device, backend = torch.device("cuda", hvd.local_rank()), "nccl"
            torch.cuda.set_device(self._device)
        self._steps: dict[str, Callable[[], object]] = {}
        self._models: list[nn.Module] = []
        device = str(self._device)
        peers = {"sirtaki": TorchSirtaki(device), backend: TorchDistributed(backend, device)}
        super().__init__(peers, hvd.rank(), hvd.size())

    def block(self, who: str, calls: int) -> list[float]:
        """Returns the duration of each call until the GPU has finished it, in microseconds."""
        call = self._bound[who].call
        self._timed(call, WARM_UP, 1e6)
        return self._timed(call, calls, 1e6)

    def prepare_steps(self, model: str) -> list[str]:
        """Makes two copies of the model, one for each kind of exchange. Returns the kinds."""
        torch.manual_seed(1 + self.number)
        made = MODELS[model]()
        step = Step(made.make_model, made.batch.to(self._device))
        self._steps.clear()
        self._models.clear()
        gc.collect()
        for who in ("sirtaki", "ddp"):
            torch.manual_seed(0)
            copy = step.make_model().to(self._device)
            if who == "ddp":
                gpus = None if self._device.index is None else [self._device.index]
                copy = nn.parallel.DistributedDataParallel(copy, device_ids=gpus)
            optimizer: Any = torch.optim.SGD(copy.parameters(), lr=LEARNING_RATE)
            if who == "sirtaki":
                optimizer = hvd.DistributedOptimizer(optimizer, copy.named_parameters())
            self._models.append(copy)
            self._steps[who] = partial(step.train, copy, optimizer)
            for _ in range(WARM_UP):
                self._steps[who]()
        return list(self._steps)

    def steps(self, who: str, count: int) -> list[float]:
        """Returns the duration of each step, in milliseconds."""
        return self._timed(self._steps[who], count, 1e3)

    def deviation(self) -> float:
        return deviation(self._models)

    def _timed(self, call: Callable[[], object], calls: int, unit: float) -> list[float]:
        times = []
        for _ in range(calls):
            self._wait()
            dist.barrier()
            self._wait()
            start = time.perf_counter()
            call()
            self._wait()
            times.append((time.perf_counter() - start) * unit)
        return times

    def _wait(self) -> None:
        """Waits for the GPU; the CPU has finished an operation when it returns."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()


STEP_COLUMNS: Columns = {
    "model": "{model}",
    "sirtaki ms": lambda row: f"{median(row['times']['sirtaki']):.3f}",
    "DDP ms": lambda row: f"{median(row['times']['ddp']):.3f}",
    "DDP / sirtaki": lambda row: f"{ratio(row['times']['ddp'], row['times']['sirtaki']):.2f}",
}


def measure(options: Namespace) -> Results:
    gpus = torch.cuda.device_count()
    ranks = options.ranks or gpus
    if not options.try_on_cpu:
        if not gpus:
            sys.exit("there is no GPU here: this compares operations on GPUs, so nothing was measured")
        if ranks > gpus:
            sys.exit(f"there are {gpus} GPU(s) here, and each rank takes one: say -np {gpus}")
    rows: list[Row] = []
    device = "cpu" if options.try_on_cpu else "cuda"
    with Job(hvdrun(ranks), ranks, GpuRank, device, settings={"SIRTAKI_GPU_BACKEND": "nccl"}) as job:
        versions = job.ask("versions")[0]
        for name in options.only:
            for size in options.sizes:
                whole = max(size // 4 // ranks, 1) * ranks * 4  # each rank's part has whole elements
                implementations = job.ask("prepare", collective=name, size=whole)[0]
                blocks = job.blocks(implementations, options.rounds, CALLS)
                rows += make_rows(name, whole, ranks, blocks, BASELINE)
        steps = [measure_model(job, model, options.rounds) for model in options.models]
    return {"versions": versions, "ranks": ranks, "rows": rows, "steps": steps}


def measure_model(job: Job, model: str, rounds: int) -> Row:
    """Measures steps in turns; times in milliseconds, of the slower rank."""
    kinds = job.ask("prepare_steps", model=model)[0]
    rounds_of = alternate({who: partial(job.slowest, "steps", who=who, count=STEPS) for who in kinds}, rounds)
    times = {who: [step for measured in found for step in measured] for who, found in rounds_of.items()}
    return {"model": model, "deviation": max(job.ask("deviation")), "times": times}


def tables(results: Results) -> Iterator[Table]:
    yield from latency_tables(results["rows"], results["ranks"])
    title = f"Training step, {results['ranks']} ranks, one GPU each"
    yield make_table(title, STEP_COLUMNS, results["steps"])


OPTIONS = [
    number("-np", 0, "how many ranks; 0: as many as there are GPUs", dest="ranks"),
    sizes(SIZES),
    rounds(11, "blocks of each"),
    choice("--only", OPERATIONS, "these operations"),
    choice("--models", list(MODELS), "steps of these models"),
    Option("--try-on-cpu", action="store_true", help="tries the benchmark itself where there is no GPU"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables)

if __name__ == "__main__":
    BENCHMARK.main()
