"""Measures a training step between hosts with and without overlap_forward.

    sudo python benchmarks/overlap_forward.py [--hosts 2] [--rate 1gbit] [--steps 10] [--partition-bytes 512K]
                                              [--models vgg "vgg elsewhere"] [--json FILE]

The hosts are network namespaces on a bridge, each with one rank and its own link of the given rate (tc tbf;
"none": as fast as the kernel allows). "alone" is the step without any exchange, "synchronous" sends gradients
in the order in which the backward pass makes them, while it runs. Blocks take turns. The models:

vgg            a convolutional network with the proportions of VGG: nearly all parameters in the last layers
transformer    12 layers of equal size
vgg elsewhere  the parameters of vgg, in layers that wait for as long as their computation would take, so that
               the exchange has the processor for itself

No step with exchange can be shorter than "alone", or than the time of its bytes on the link.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar

import torch
from common.harness import Benchmark, Results
from common.host_steps import Answers, measure_steps, step_options, step_table
from common.measure import median
from common.models import deviation, transformer, vgg, waiting_vgg
from common.options import Option, choice
from common.report import Columns, Row, Table, Target, at_least
from common.torch_ranks import StepRank
from torch import nn

import sirtaki.torch as hvd

LEAST_GAIN = 1.3  # times the synchronous step's speed, on a link of 1 Gbit/s: P3's for ResNet-50 and Sockeye
LEAST_ANYWHERE = 0.98
GAINING = ("vgg", "vgg elsewhere")  # models whose last layers have the parameters


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


class OverlapRank(StepRank):
    """The orders that a rank executes."""

    models: ClassVar = {"vgg": vgg, "transformer": transformer, "vgg elsewhere": waiting_vgg}
    ways: ClassVar = {
        "alone": plain,  # no exchange
        "synchronous": lambda model: hvd.DistributedOptimizer(plain(model)),
        "overlap_forward": lambda model: hvd.DistributedOptimizer(plain(model), overlap_forward=True),
    }
    warm_up = 4  # the order of use is known in the third step

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._trained: dict[str, nn.Module] = {}  # the last model of each way
        self._way = ""

    def use(self, way: str, model: nn.Module) -> None:
        """Keeps the model for comparisons."""
        self._way, self._trained[way] = way, model

    def steps(self, calls: int) -> dict[str, Any]:
        """Works like `StepRank.steps`, and compares the parameters with those of the synchronous training.

        The deviation is 0 if they have the same bits. "processor" is the processor time of a step, in
        milliseconds: that of all threads of this process, in the program and in the kernel.
        """
        before = time.process_time()
        answer = super().steps(calls)
        answer["processor"] = (time.process_time() - before) / calls * 1e3
        if self._way == "overlap_forward":
            answer["deviation"] = deviation([self._trained["synchronous"], self._trained[self._way]])
        return answer


COLUMNS: Columns = {
    "model": "{model}",
    "way": "{way}",
    "step ms": "{milliseconds:,.1f}",
    "processor ms": "{processor:,.0f}",
    "synchronous time / its time": "{gain:.2f}",
    "difference": "{difference:g}",
}


def measure(options: Namespace) -> Results:
    """Measures all ways in turns."""
    settings = {"SIRTAKI_PARTITION_BYTES": options.partition_bytes}
    results = measure_steps(options, OverlapRank, "synchronous", facts, settings)
    return {**results, "partition_bytes": options.partition_bytes}


def facts(answers: list[Answers]) -> Row:
    """Returns the median of the processor time, and the difference from the synchronous parameters."""
    ranks = [rank for block in answers for rank in block]
    difference = max(rank.get("deviation", 0.0) for rank in ranks)
    return {"processor": median(rank["processor"] for rank in ranks), "difference": difference}


def tables(results: Results) -> list[Table]:
    return [step_table(results, COLUMNS)]


def judge(results: Results) -> list[Target]:
    """Returns the target for models whose last layers have the parameters, and those for all."""
    gains = {row["model"]: row["gain"] for row in results["rows"] if row["way"] == "overlap_forward"}
    targets = [
        at_least(f"speed of {name}, times synchronous", LEAST_ANYWHERE, gain) for name, gain in gains.items()
    ]
    if results["rate"] == "1gbit":
        targets += [
            at_least(f"speed of {name} at 1 Gbit/s, times synchronous", LEAST_GAIN, gains[name])
            for name in GAINING
            if name in gains
        ]
    return targets


OPTIONS = [
    *step_options(3, 10),
    choice("--models", list(OverlapRank.models), "which models (all)"),
    Option("--partition-bytes", default="512K", help="largest part of a gradient (512K)"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
