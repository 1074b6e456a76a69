"""Measures the exchange's cost in a training step, beside its peers, on two ranks of one thread each.

    python benchmarks/train_step.py [--rounds 40] [--keep-gradients] [--json FILE]

One pair of processes runs a step of each kind in turn: `sync` (a barrier only, nothing is exchanged), DDP
over gloo, sirtaki, sirtaki with gradients in shared memory, and a throw-away prototype (all gradients after
the backward pass, in a fixed order, without negotiation). The result is the median of the differences
step - sync within a round. The second measurement is the overlap: a backward pass that sleeps while
gradients move.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from common import native
from common.harness import Benchmark, Results
from common.jobs import KEEP_MEMORY, Job, hvdrun
from common.measure import alternate, difference, median, timed
from common.memory_bound import MemoryBound
from common.models import MODELS, Step, deviation
from common.options import Option, choice, rounds
from common.report import Columns, Row, Table, Target, at_most, make_table
from common.serving import bind
from common.torch_ranks import TorchRank, alternate_steps
from torch import Tensor, nn

import sirtaki.torch as hvd

RANKS = 2
NO_EXCHANGES = ("sync", "memory bound")  # what is measured beside them
MOST = 1.3  # times what the prototype adds
OVERLAPS = {"longer": 2.0, "shorter": 0.5}  # compute as a multiple of the exchange
OVERLAP_ROUNDS = 3
LEARNING_RATE = 0.01
WARM_UP_ROUNDS = 3
LAYERS = 24  # of the model whose backward pass sleeps
ELEMENTS = 1 << 20  # 4 MiB per layer


class Variant:
    """A copy of the model, and the exchange of its gradients between backward pass and step."""

    def __init__(self, step: Step) -> None:
        torch.manual_seed(0)  # all copies on all ranks start with equal parameters
        self.step = step
        self.model: nn.Module = step.make_model()
        self.rate = LEARNING_RATE
        self.exchange: Callable[[], object] = lambda: None

    def finish(self) -> Variant:
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=self.rate)
        return self

    def run(self) -> None:
        """Runs one training step."""
        self.step.train(self.model, self.optimizer, self.exchange)


def with_barrier(step: Step, bound: MemoryBound) -> Variant:
    """Exchanges nothing: the ranks only meet in a barrier."""
    variant = Variant(step).finish()
    variant.exchange = bound.barrier
    return variant


def with_sirtaki(step: Step, **options: Any) -> Variant:
    variant = Variant(step).finish()
    names = variant.model.named_parameters()
    variant.optimizer = hvd.DistributedOptimizer(variant.optimizer, names, **options)
    return variant


def with_ddp(step: Step, group: Any = None) -> Variant:
    """Exchanges over a process group of torch.distributed; by default over gloo."""
    variant = Variant(step)
    variant.model = nn.parallel.DistributedDataParallel(variant.model, process_group=group)
    return variant.finish()


def with_prototype(step: Step, bound: MemoryBound) -> Variant:
    """Sums all gradients after the backward pass, in a fixed order, without negotiation.

    The sum is not divided: the learning rate compensates for that, so that averaging costs nothing.
    """
    variant = Variant(step)
    variant.rate = LEARNING_RATE / hvd.size()
    parameters = list(variant.model.parameters())
    counts = [parameter.numel() for parameter in parameters]

    def exchange() -> None:
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        bound.bind([gradient.data_ptr() for gradient in gradients], counts)()

    variant.exchange = exchange
    return variant.finish()


class TrainRank(TorchRank):
    """Whole training steps with each kind of exchange, in turns."""

    def __init__(self, folder: Path, prototype: str) -> None:
        super().__init__(folder)
        share = partial(hvd.broadcast_object, root_rank=0)
        self.bound = MemoryBound(Path(prototype), self.number, self.size, share)
        self.copies: dict[str, Variant] = {}
        self.join_group()
        bind(self.number, self.size)

    def variants(self, step: Step) -> dict[str, Variant]:
        """Returns a copy of the model for each kind of exchange; the one named sync exchanges nothing."""
        return {
            "sync": with_barrier(step, self.bound),
            "ddp": with_ddp(step),
            "sirtaki": with_sirtaki(step),
            "sirtaki, shared": with_sirtaki(step, gradients_in_shared_memory=True),
            "prototype": with_prototype(step, self.bound),
        }

    def prepare(self, model: str, keeps_gradients: bool) -> dict[str, int]:
        """Makes a copy of the model for each kind of exchange. Returns the amount of data to exchange."""
        torch.manual_seed(1 + self.number)
        step = replace(MODELS[model](), keeps_gradients=keeps_gradients)
        self.copies.clear()
        gc.collect()
        self.copies.update(self.variants(step))
        counts = [parameter.numel() for parameter in self.copies["sync"].model.parameters()]
        self._flat = np.zeros(sum(counts), np.float32)
        self._bare = self.bound.bind([self._flat.ctypes.data], [self._flat.size])
        self.rounds(WARM_UP_ROUNDS)
        return {"parameters": sum(counts), "tensors": len(counts)}

    def rounds(self, count: int) -> dict[str, list[float]]:
        """Runs one step of each kind per round. Times in milliseconds."""
        calls = {name: variant.run for name, variant in self.copies.items()}
        return alternate_steps({**calls, "memory bound": self._bare}, count, self.bound.barrier)

    def deviation(self) -> float:
        """Returns how far the copies that exchange have diverged."""
        return deviation([one.model for name, one in self.copies.items() if name != "sync"])


class Sleep(torch.autograd.Function):
    """A function that adds a weight; its derivative takes a while, in which the processor is free."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        context.layer = layer
        return x + weight[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = context.layer
        time.sleep(layer.seconds)
        return gradient, layer.gradient.view(-1), None


class Layer(nn.Module):
    """A weight whose gradient always lies in the same memory, so that making a gradient costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))
        self.gradient = torch.zeros(ELEMENTS)
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.weight, self)


class SleepingRank(TorchRank):
    """A backward pass that sleeps, as a pass does while a GPU works."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.join_group()
        self._model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self._ddp_model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*(Layer() for _ in range(LAYERS)))
        )
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)
        self._optimizer: Any = hvd.DistributedOptimizer(optimizer, self._model.named_parameters())

    def backward(self, kind: str, seconds: float, calls: int) -> float:
        """Returns the median of a backward pass that sleeps for so long in each layer, in milliseconds.

        The kinds: "step" with the exchange of gradients, "compute" without it, "ddp" with DDP over gloo.
        """
        model = self._ddp_model if kind == "ddp" else self._model
        for module in model.modules():
            if isinstance(module, Layer):
                module.seconds = seconds

        def run() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            self._optimizer.zero_grad()
            model(torch.zeros(1, requires_grad=True)).sum().backward()

        def run_alone() -> None:
            with self._optimizer.no_sync():
                run()

        call = run_alone if kind == "compute" else run
        hvd.barrier()
        timed(call, 2)
        result = median(timed(call, calls)) / 1e3
        if kind == "compute":
            self._optimizer.zero_grad()
        return result


OVERLAP_COLUMNS: Columns = {
    "compute ms": "{compute:.2f}",
    "exchange ms": "{exchange:.2f}",
    "step ms": "{step:.2f}",
    "DDP's step ms": "{ddp:.2f}",
    "step / max(compute, exchange)": "{ratio:.2f}",
}


def measure(options: Namespace) -> Results:
    """Runs everything. Times in milliseconds."""
    results = measure_models(TrainRank, options.models, options.rounds, options.keep_gradients)
    with Job(hvdrun(RANKS), RANKS, SleepingRank) as job:
        calls = options.rounds // 3 + 3
        return {**results, "overlap": [measure_overlap(job, factor, calls) for factor in OVERLAPS.values()]}


def measure_models(
    rank: type[TrainRank], models: Sequence[str], rounds: int, keeps_gradients: bool = False
) -> Results:
    """Measures the steps of models with all exchanges of a rank."""
    with Job(hvdrun(RANKS), RANKS, rank, str(native.build("memory_bound")), settings=KEEP_MEMORY) as job:
        versions = job.ask("versions")[0]
        measured = [measure_model(job, model, rounds, keeps_gradients) for model in models]
        return {"versions": versions, "models": measured}


def measure_model(job: Job, model: str, rounds: int, keeps_gradients: bool) -> dict[str, Any]:
    facts = job.ask("prepare", model=model, keeps_gradients=keeps_gradients)[0]
    times = job.rounds(rounds, fmean)
    exchanges = [name for name in times if name not in NO_EXCHANGES]
    costs = {name: difference(times[name], times["sync"]) for name in exchanges}
    return {"model": model, **facts, "deviation": job.deviation(model), "times": times, "costs": costs}


def measure_overlap(job: Job, factor: float, calls: int) -> Row:
    """Measures compute of `factor` times the exchange's time; blocks with and without exchange take turns."""

    def rank_0(kind: str, seconds: float = 0.0) -> float:
        return job.ask("backward", kind=kind, seconds=seconds, calls=calls)[0]

    pause = rank_0("step") * factor / LAYERS / 1e3
    times = alternate(
        {
            "compute": partial(rank_0, "compute", pause),
            "step": partial(rank_0, "step", pause),
            "exchange": partial(rank_0, "step"),
            "ddp": partial(rank_0, "ddp", pause),
        },
        OVERLAP_ROUNDS,
    )
    parts = zip(times["step"], times["compute"], times["exchange"], strict=True)
    times["ratio"] = [step / max(compute, exchange) for step, compute, exchange in parts]
    return {name: median(found) for name, found in times.items()}


def tables(results: Results) -> Iterator[Table]:
    yield models_table(results["models"])
    if results["overlap"]:
        title = "Backward pass that sleeps while gradients move"
        yield make_table(title, OVERLAP_COLUMNS, results["overlap"], text_columns=0)


def models_table(models: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the steps of each model with each exchange."""
    rows: list[list[str]] = []
    for model in models:
        sync = median(model["times"]["sync"])
        rows += [[], [model["model"], "sync", f"{sync:.2f}", "", ""]]
        for name, cost in model["costs"].items():
            share = f"{cost.median / sync:+.0%}"
            rows.append([model["model"], name, f"{median(model['times'][name]):.2f}", f"{cost:.2f}", share])
        title = f"{model['parameters'] / 1e6:.1f} M parameters in {model['tensors']} tensors"
        bound = f"{median(model['times']['memory bound']):.2f}"
        rows.append([title, "memory bound, one buffer", bound, "", ""])
    head = ["model", "exchange", "median ms", "step - sync, ms (95 %)", "over sync"]
    return Table(f"Training step, {RANKS} ranks, one thread each", head, rows[1:], text_columns=2)


def judge(results: Results) -> list[Target]:
    targets = [judge_model(model) for model in results["models"]]
    for name, row in zip(OVERLAPS, results["overlap"], strict=True):
        what = f"backward sleeps {name} than the exchange: step / max(both)"
        targets.append(at_most(what, 1.1, row["ratio"], "×"))
    return targets


def judge_model(model: dict[str, Any]) -> Target:
    """Returns the bound: the prototype's added cost, with a margin, and 1 µs for each tensor."""
    bound = MOST * model["costs"]["prototype"].median + 0.001 * model["tensors"]
    what = f"step - sync, {model['model'].partition(',')[0]}"
    return at_most(what, bound, model["costs"]["sirtaki"].median, "ms")


KEEP = Option("--keep-gradients", action="store_true", help="zero gradients instead of dropping them")
MODELS_OPTION = choice("--models", list(MODELS), "which models (all)")
BENCHMARK = Benchmark(
    __doc__, [rounds(40, "steps of each kind"), KEEP, MODELS_OPTION], measure, tables, judge
)

if __name__ == "__main__":
    BENCHMARK.main()
