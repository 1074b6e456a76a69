"""Measures a training step between hosts with each compression of gradients.

    sudo python benchmarks/compression_step.py [--hosts 2] [--rate 1gbit] [--steps 5] [--json FILE]

The hosts are network namespaces on a bridge, each with one rank and its own link of the given rate (tc tbf;
"none": as fast as the kernel allows). "alone" is the step without any exchange. The models are six layers of
2,048 units (100 MB of gradients in 12 tensors), where the link takes the time, and a transformer (38 MB in
144 tensors). Each compression begins anew in each block of steps, and blocks take turns.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any, ClassVar

import torch
from common.harness import Benchmark, Results
from common.host_steps import Answers, measure_steps, step_options, step_table
from common.models import large_linear, transformer
from common.report import Columns, Row, Table, Target, at_least
from common.torch_ranks import StepRank
from torch import nn

import sirtaki.torch as hvd

PACE = ("linear", "powersgd(4)")  # the row that has a target
LEAST_GAIN = 1.5  # times the uncompressed step's speed, on a link of 1 Gbit/s
COMPRESSIONS = {
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "powersgd(1)": lambda: hvd.Compression.powersgd(1, start=0),
    "powersgd(4)": lambda: hvd.Compression.powersgd(4, start=0),
    "topk(0.01)": lambda: hvd.Compression.topk(0.01, start=0),
    "onebit": lambda: hvd.Compression.onebit(start=0),
    "int8": lambda: hvd.Compression.int8(),
    "fp8": lambda: hvd.Compression.fp8(),
}


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def compressed(name: str, model: nn.Module) -> Any:
    return hvd.DistributedOptimizer(plain(model), compression=COMPRESSIONS[name]())


class CompressedRank(StepRank):
    """The orders that a rank executes."""

    models: ClassVar = {"linear": large_linear, "transformer": transformer}
    ways: ClassVar = {"alone": plain, **{name: partial(compressed, name) for name in COMPRESSIONS}}
    warm_up = 2  # the first step is exact

    def steps(self, calls: int) -> dict[str, Any]:
        """Works like `StepRank.steps`, and returns the bytes that a step has sent, too."""
        before = hvd.stats()["compression"]
        answer = super().steps(calls)
        after = hvd.stats()["compression"]
        sent, exact = ((after[key] - before[key]) / calls for key in ("sent_bytes", "exact_bytes"))
        return {**answer, "sent": sent, "exact": exact, "error": after["relative_error"]}


COLUMNS: Columns = {
    "model": "{model}",
    "compression": "{way}",
    "step ms": "{milliseconds:,.1f}",
    "none's time / its time": "{gain:.2f}",
    "bytes sent": lambda row: f"{row['share']:.2%}" if row["share"] else "",
    "left out": lambda row: f"{row['error']:.2f}" if row["share"] else "",
}


def measure(options: Namespace) -> Results:
    """Measures all compressions in turns."""
    return measure_steps(options, CompressedRank, "none", facts)


def facts(answers: list[Answers]) -> Row:
    """Returns the share of the compressed gradients' bytes that were sent, 0 without any, and the error."""
    last = answers[-1][0]
    share = last["sent"] / last["exact"] if last["exact"] else 0.0
    return {"share": share, "error": last["error"] if share else 0.0}


def tables(results: Results) -> list[Table]:
    return [step_table(results, COLUMNS)]


def judge(results: Results) -> list[Target]:
    """Returns the target for the model whose gradients take most of the step."""
    if results["rate"] != "1gbit":
        return []
    (gain,) = (row["gain"] for row in results["rows"] if (row["model"], row["way"]) == PACE)
    return [at_least("speed of a step with powersgd(4), times that without", LEAST_GAIN, gain)]


BENCHMARK = Benchmark(__doc__, step_options(2, 5), measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
