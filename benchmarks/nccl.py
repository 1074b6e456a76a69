"""Compares operations on GPUs with plain NCCL, and a training step with DDP's, with one rank per GPU.

    python benchmarks/nccl.py [-np 2] [--sizes 1K 64K 1M 64M] [--rounds 11] [--json FILE]

The peer is torch.distributed's "nccl", in the same processes. They take turns in blocks of calls, and each
call is timed until the GPU is done with it. A ratio is the median of those of adjacent blocks. By default
each GPU has a rank. With one GPU, both use a communicator of one rank, which shows their own costs.
`--try-on-cpu` tries the benchmark where there is no GPU, beside gloo: its figures say nothing of GPUs.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from typing import Any

from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.latency import Row, make_rows, show_latency
from common.measure import alternate, median, ratio
from common.options import KIB, MIB, Option, choice, number, rounds, sizes
from common.report import show_rows
from train_step import MODELS

GPU_MODELS = [*MODELS, "ResNet-50, batch 64", "TransformerEncoder 12 × 768, batch 16 × 256"]

SIZES = [KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
OPERATIONS = ["allreduce", "broadcast", "allgather", "reducescatter", "alltoall"]
BASELINE = {"nccl": "sirtaki", "gloo": "sirtaki"}
CALLS = 20  # per block
STEPS = 10  # per round

STEP_COLUMNS = [
    ("model", lambda step: step["model"]),
    ("sirtaki ms", lambda step: f"{median(step['times']['sirtaki']):.3f}"),
    ("DDP ms", lambda step: f"{median(step['times']['ddp']):.3f}"),
    ("DDP / sirtaki", lambda step: f"{ratio(step['times']['ddp'], step['times']['sirtaki']):.2f}"),
]


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def measure(options: Namespace) -> Results:
    gpus = count_gpus()
    ranks = options.ranks or gpus
    if not options.try_on_cpu:
        if not gpus:
            sys.exit("there is no GPU here: this compares operations on GPUs, so nothing was measured")
        if ranks > gpus:
            sys.exit(f"there are {gpus} GPU(s) here, and each rank takes one: say -np {gpus}")
    rows: list[Row] = []
    device = "cpu" if options.try_on_cpu else "cuda"
    with Job(hvdrun(ranks), ranks, "workers.nccl", device, settings={"SIRTAKI_GPU_BACKEND": "nccl"}) as job:
        versions = job.ask("versions")[0]
        for name in options.only:
            for size in options.sizes:
                whole = max(size // 4 // ranks, 1) * ranks * 4  # each rank's part has whole elements
                implementations = job.ask("prepare", collective=name, size=whole)[0]
                blocks = job.blocks(implementations, options.rounds, CALLS)
                rows += make_rows(name, whole, ranks, blocks, BASELINE)
        steps = [measure_model(job, model, options.rounds) for model in options.models]
    return {"versions": versions, "ranks": ranks, "rows": rows, "steps": steps}


def measure_model(job: Job, model: str, rounds: int) -> dict[str, Any]:
    """Measures steps in turns; times in milliseconds, of the slower rank."""
    kinds = job.ask("prepare_steps", model=model)[0]
    rounds_of = alternate({who: partial(job.slowest, "steps", who=who, count=STEPS) for who in kinds}, rounds)
    times = {who: [step for measured in found for step in measured] for who, found in rounds_of.items()}
    return {"model": model, "deviation": max(job.ask("deviation")), "times": times}


def show(results: Results) -> None:
    show_latency(results["rows"], results["ranks"])
    show_rows(f"Training step, {results['ranks']} ranks, one GPU each", STEP_COLUMNS, results["steps"])


OPTIONS = [
    number("-np", 0, "how many ranks; 0: as many as there are GPUs", dest="ranks"),
    sizes(SIZES),
    rounds(11, "blocks of each"),
    choice("--only", OPERATIONS, "these operations"),
    choice("--models", GPU_MODELS, "steps of these models"),
    Option("--try-on-cpu", action="store_true", help="tries the benchmark itself where there is no GPU"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show)

if __name__ == "__main__":
    BENCHMARK.main()
