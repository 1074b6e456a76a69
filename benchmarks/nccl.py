"""Compares operations on GPUs with plain NCCL, and a training step with DDP's, with one rank per GPU.

    python benchmarks/nccl.py [-np 2] [--sizes 1K 64K 1M 64M] [--rounds 11] [--json FILE]

The peer is torch.distributed's "nccl", in the same processes. They take turns in blocks of calls, and each
call is timed until the GPU is done with it. A ratio is the median of those of adjacent blocks. GPUs are
required.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from common.collectives import COLLECTIVES
from common.jobs import Job, hvdrun
from common.measure import median, median_interval
from common.models import MODELS
from common.options import KIB, MIB, add_sizes, parser
from common.report import save, show_machine, show_table
from common.turns import Row, compare, make_row, show_rows, slowest

SIZES = [KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
OPERATIONS = ["allreduce", "broadcast", "allgather", "reducescatter", "alltoall"]
CALLS = 20  # per block
STEPS = 10  # per round
NO_GPU = "there is no GPU here: this compares operations on GPUs, so nothing was measured"


def main() -> None:
    options = arguments()
    gpus = count_gpus()
    if not gpus:
        sys.exit(NO_GPU)
    if options.ranks > gpus:
        sys.exit(f"there are {gpus} GPU(s) here, and each rank takes one: say -np {gpus}")
    show_machine()
    results, rows = measure(options)
    for name in options.only:
        show_rows([row for row in rows if row.collective == name], options.ranks)
    show_steps(results["steps"], options.ranks)
    save(options.json, results, [])


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, 11, "blocks of each")
    add_sizes(made, SIZES)
    made.add_argument("--only", nargs="+", choices=OPERATIONS, default=OPERATIONS, help="these operations")
    return made.parse_args(given)


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Runs everything. Returns the contents of the JSON file, and the rows."""
    rows: list[Row] = []
    with Job(hvdrun(options.ranks), options.ranks, "workers.nccl") as job:
        versions = job.ask("versions")[0]
        for name in options.only:
            for size in options.sizes:
                rows += measure_size(job, name, size, options)
        steps = [measure_model(job, model, options.rounds) for model in MODELS]
    results = {
        "versions": versions,
        "ranks": options.ranks,
        "rows": [asdict(row) for row in rows],
        "steps": steps,
    }
    return results, rows


def measure_size(job: Job, name: str, size: int, options: argparse.Namespace) -> list[Row]:
    """Returns one row for each implementation, from `options.rounds` blocks each, in turns."""
    ranks = options.ranks
    count = max(size // 4 // ranks, 1) * ranks
    implementations = job.ask("prepare", collective=name, count=count)[0]
    blocks: dict[str, list[list[float]]] = {who: [] for who in implementations}
    for _ in range(options.rounds):
        for who in implementations:
            blocks[who].append(slowest(job.ask("block", who=who, calls=CALLS)))
    return rows_of(name, 4 * count, ranks, blocks)


def rows_of(name: str, size: int, ranks: int, blocks: dict[str, list[list[float]]]) -> list[Row]:
    """Summarizes the blocks of calls (microseconds), and compares the peer's time with sirtaki's."""
    assert name in COLLECTIVES
    rows = []
    for who, times in blocks.items():
        row = make_row(name, size, who, ranks, [time for block in times for time in block])
        row.slower = compare(blocks, who, "sirtaki") if who != "sirtaki" else None
        rows.append(row)
    return rows


def measure_model(job: Job, model: str, rounds: int) -> dict[str, Any]:
    """Measures steps in turns; times in milliseconds, of the slower rank."""
    job.ask("prepare_steps", model=model)
    times: dict[str, list[float]] = {"sirtaki": [], "ddp": []}
    for _ in range(rounds):
        for who, found in times.items():
            found += slowest(job.ask("steps", who=who, count=STEPS))
    return {"model": model, "deviation": max(job.ask("deviation")), "times": times}


def show_steps(steps: list[dict[str, Any]], ranks: int) -> None:
    rows = []
    for one in steps:
        mine, theirs = one["times"]["sirtaki"], one["times"]["ddp"]
        ratio = median_interval([its / my for my, its in zip(mine, theirs, strict=True)])
        cells = [f"{median(mine):.3f}", f"{median(theirs):.3f}"]
        rows.append([one["model"], *cells, f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"])
    head = ["model", "sirtaki ms", "DDP ms", "DDP / sirtaki"]
    show_table(f"Training step, {ranks} ranks, one GPU each", head, rows)


if __name__ == "__main__":
    main()
