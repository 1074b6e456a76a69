"""Measures sirtaki as a backend of torch.distributed beside gloo, on two ranks of one thread each.

    python benchmarks/torch_backend.py [--rounds 40] [--json FILE]

One pair of processes runs a step of each kind in turn: `sync` (a barrier only, nothing is exchanged), DDP
over gloo and over sirtaki, and FSDP2, which divides the parameters of each layer, over both. The weights
that both backends lead to are compared.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from common import native
from common.harness import Benchmark, Results
from common.jobs import KEEP_MEMORY, Job, hvdrun
from common.measure import median, ratio
from common.options import rounds
from common.report import Target, at_least, show_table
from train_step import MODELS, RANKS, measure_model, show_models

LEAST_DDP = 1.5  # times gloo's added time over sirtaki's
LEAST_FSDP = 1.0  # times gloo's step over sirtaki's


def measure(options: Namespace) -> Results:
    """Runs everything. Times in milliseconds."""
    folder = str(native.build())
    with Job(hvdrun(RANKS), RANKS, "workers.torch_backend", folder, settings=KEEP_MEMORY) as job:
        versions = job.ask("versions")[0]
        return {"versions": versions, "models": [measure_model(job, one, options.rounds) for one in MODELS]}


def show(results: Results) -> None:
    show_models(results["models"])
    rows = []
    for model in results["models"]:
        times = model["times"]
        steps = [ratio(times[f"{kind}, gloo"], times[f"{kind}, sirtaki"]) for kind in ("DDP", "FSDP2")]
        rows.append([model["model"], f"{added_by_ddp(model):.2f}", *(f"{step:.2f}" for step in steps)])
    head = ["model", "DDP's step - sync", "DDP's step", "FSDP2's step"]
    show_table("gloo / sirtaki (95 %)", head, rows)


def added_by_ddp(model: dict[str, Any]) -> float:
    """Returns what DDP adds to a step over gloo, divided by what it adds over sirtaki."""
    gloo, sirtaki = (model["costs"][f"DDP, {backend}"].median for backend in ("gloo", "sirtaki"))
    return gloo / max(sirtaki, 1e-9)


def judge(results: Results) -> list[Target]:
    targets = []
    for model in results["models"]:
        name, times = model["model"].partition(",")[0], model["times"]
        step = median(times["FSDP2, gloo"]) / median(times["FSDP2, sirtaki"])
        targets.append(at_least(f"DDP's step - sync, gloo / sirtaki, {name}", LEAST_DDP, added_by_ddp(model)))
        targets.append(at_least(f"FSDP2's step, gloo / sirtaki, {name}", LEAST_FSDP, step))
    return targets


BENCHMARK = Benchmark(__doc__, [rounds(40, "steps of each kind")], measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
