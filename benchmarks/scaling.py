"""Measures how fast published models are trained on GPUs, on one and on all, beside DDP.

    python benchmarks/scaling.py [-np 8] [--models ResNet-50 BERT-large] [--rounds 5] [--json FILE]

Each GPU has a rank and a batch of random samples; torch computes in bfloat16 where autocast allows it. The
ways of training take turns in blocks of steps that follow each other without a pause, each with a new copy of
the model. In the first way one rank trains without any communication, while the other ranks wait. Scaling
efficiency is what each of N GPUs achieves, divided by what one GPU achieves alone, in the same round. By
default DDP also broadcasts the statistics of batch normalisation before each forward pass.
`--try-on-cpu` tries the benchmark where there is no GPU, beside gloo, with small versions of the models.
"""

from __future__ import annotations

import gc
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.gpus import RANKS, TRY_ON_CPU, finish, job_on_gpus, own_device
from common.harness import Benchmark, Results
from common.jobs import Job
from common.measure import alternate, median, ratio
from common.models import PUBLISHED, Classification
from common.options import choice, number, rounds
from common.report import Row, Table
from common.torch_ranks import TorchRank
from torch import nn

import sirtaki.torch as hvd

ALONE = "1 GPU, no communication"
WARM_UP = 5  # steps before those that are measured: cuDNN tries its algorithms, sirtaki compares parameters
SMALL_BATCH = 2
MOST_MEMORY = 0.7  # of what a GPU has free, for a step without communication: the exchange needs some, too
MOST_DIFFERENCE = 1e-6  # of the sum of a model's parameters between ranks, relative
# Published scaling efficiency on 128 hosts of 4 GPUs: https://github.com/horovod/horovod, docs/benchmarks.rst
HOROVODS = {"Inception V3, ResNet-101": 0.90, "VGG-16": 0.68}

Model, Optimizer = nn.Module, Any


def in_sirtaki(model: Model, optimizer: Optimizer, **options: Any) -> tuple[Model, Optimizer]:
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def in_ddp(model: Model, optimizer: Optimizer, **options: Any) -> tuple[Model, Optimizer]:
    return nn.parallel.DistributedDataParallel(model, **options), optimizer


WAYS: dict[str, Callable[[Model, Optimizer], tuple[Model, Optimizer]]] = {
    ALONE: lambda model, optimizer: (model, optimizer),
    "sirtaki": in_sirtaki,
    "sirtaki, gradients_in_shared_memory": partial(in_sirtaki, gradients_in_shared_memory=True),
    "DDP": in_ddp,
    "DDP, gradient_as_bucket_view": partial(in_ddp, gradient_as_bucket_view=True),
}


def largest_batch(wanted: int, memory_of: Callable[[int], float]) -> int:
    """Halves a batch until a step needs no more than a part of the memory; returns 0 if none is that small.

    `memory_of` returns the share of the memory that a step needs, or raises OutOfMemoryError.
    """
    batch = wanted
    while batch:
        try:
            if memory_of(batch) <= MOST_MEMORY:
                break
        except torch.cuda.OutOfMemoryError:
            pass
        batch //= 2
    return batch


class ScalingRank(TorchRank):
    """Trains one model on one GPU, or its small version on the CPU."""

    def __init__(self, folder: Path, kind: str, model: str) -> None:
        super().__init__(folder)
        self._device, backend = own_device(kind, hvd.local_rank())
        self.join_group(backend)
        self._published, self._is_small = PUBLISHED[model], kind == "cpu"
        self._trained: Model = nn.Module()
        torch.backends.cudnn.benchmark = True
        warnings.filterwarnings("ignore", "3 steps of .* without any exchange")  # as one of the ways wants it

    def facts(self) -> dict[str, Any]:
        """Returns the GPU's name, and the number of the model's parameters."""
        device = "the CPU" if self._is_small else torch.cuda.get_device_name(self._device)
        with torch.device("meta"):
            model = self._published.make_model(self._is_small)
        return {"device": device, "parameters": sum(parameter.numel() for parameter in model.parameters())}

    def fit(self) -> int:
        """Returns the number of samples that this GPU can have in a step."""
        return SMALL_BATCH if self._is_small else largest_batch(self._published.batch, self._memory_of)

    def rate(self, way: str, batch: int, warm_up: int, steps: int) -> dict[str, float] | None:
        """Trains a new model. Returns samples per second, and the sum of the model's parameters.

        Returns None if the way is that of one rank, and this is another.
        """
        if way == ALONE and self.number:
            return None
        step = self._make_step(way, batch)
        for _ in range(warm_up):
            step()
        self._meet(way)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        finish(self._device)
        seconds = time.perf_counter() - start
        parameters = [parameter.detach().double().abs().sum() for parameter in self._trained.parameters()]
        return {"rate": batch * steps / seconds, "sum": torch.stack(parameters).sum().item()}

    def _meet(self, way: str) -> None:
        finish(self._device)
        if way != ALONE:
            hvd.barrier()

    def _make_step(self, way: str, batch: int) -> Callable[[], None]:
        """Returns a training step of a new model: equal on all ranks, with samples of this rank."""
        self._drop()
        torch.manual_seed(0)
        with self._device:
            model = self._published.make_model(self._is_small)
        torch.manual_seed(1 + self.number)
        with self._device:
            samples, classes = self._published.make_samples(batch, self._is_small)
        step = Classification(lambda: model, samples, classes=classes)
        self._trained, optimizer = WAYS[way](model, self._published.make_optimizer(model.parameters()))
        return partial(step.train, self._trained, optimizer)

    def _drop(self) -> None:
        """Frees the memory of the former model."""
        self._trained = nn.Module()
        gc.collect()
        torch.cuda.empty_cache()

    def _memory_of(self, batch: int) -> float:
        self._drop()
        free, _ = torch.cuda.mem_get_info(self._device)
        step = self._make_step(ALONE, batch)
        step()  # cuDNN's algorithms are tried, which may need more than those it chooses
        torch.cuda.reset_peak_memory_stats()
        step()
        finish(self._device)
        return torch.cuda.max_memory_allocated() / free


def measure(options: Namespace) -> Results:
    rows = [measure_model(options, model) for model in options.models]
    return {"versions": {"torch": torch.__version__}, "rows": rows}


def measure_model(options: Namespace, model: str) -> Row:
    """Measures all ways of training a model; rates are samples per second and GPU, by round."""
    with job_on_gpus(options, ScalingRank, model) as job:
        facts = job.ask("facts")[0]
        batch = min(job.ask("fit"))
        if not batch:
            raise SystemExit(f"{model} needs more memory than {facts['device']} has free")
        order = partial(rate, job, model, batch=batch, warm_up=options.warm_up, steps=options.steps)
        rates = alternate({way: partial(order, way=way) for way in WAYS}, options.rounds)
    return {"model": model, "gpus": job.size, **facts, "batch": batch, "rates": rates}


def rate(job: Job, model: str, way: str, **arguments: int) -> float:
    """Returns the samples per second of the slowest rank; fails if ranks have trained different models."""
    ranks = [answer for answer in job.ask("rate", way=way, **arguments) if answer]
    sums = [rank["sum"] for rank in ranks]
    if not all(abs(found - sums[0]) <= MOST_DIFFERENCE * sums[0] for found in sums):
        raise SystemExit(
            f"{model}, {way}: the ranks' parameters differ or are not finite; their sums: {sums}"
        )
    return min(rank["rate"] for rank in ranks)


def tables(results: Results) -> Iterator[Table]:
    """Returns a table of each model: its ways of training, then Horovod's published figures."""
    for row in results["rows"]:
        samples = PUBLISHED[row["model"]].samples
        rows: list[list[str]] = []
        for way, rates in row["rates"].items():
            name = way if way == ALONE else f"{row['gpus']} GPUs, {way}"
            efficiency = "" if way == ALONE else format(ratio(rates, row["rates"][ALONE]), ".1%")
            rows.append([name, f"{median(rates):,.1f}", efficiency])
        rows += [
            [f"512 Pascal GPUs, 25 Gbit/s, Horovod as published: {models}", "", f"{efficiency:.0%}"]
            for models, efficiency in HOROVODS.items()
        ]
        title = (
            f"Training of {row['model']}, {row['parameters'] / 1e6:.1f} M parameters, on {row['device']}"
            f" with {row['batch']} {samples} per GPU and step in bfloat16"
        )
        yield Table(title, ["", f"{samples}/s per GPU", "scaling efficiency (95 %)"], rows)


OPTIONS = [
    RANKS,
    choice("--models", list(PUBLISHED), "these models"),
    rounds(5, "blocks of each way"),
    number("--steps", 15, "steps of a block"),
    number("--warm-up", WARM_UP, "steps before those that are measured", dest="warm_up"),
    TRY_ON_CPU,
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables)

if __name__ == "__main__":
    BENCHMARK.main()
