"""Measures models that are divided over two ranks, over sirtaki and over gloo.

    python benchmarks/model_parallel.py [--rounds 40] [--json FILE]

One pair of processes of one thread each runs a training step over each backend in turn: `tensor parallel`
divides the weights of each pair of layers (DTensor), `pipeline` gives each rank half of the layers (1F1B).
The weights that both backends lead to are compared.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median, ratio
from common.options import rounds
from common.report import Target, at_least, show_table

RANKS = 2
DIVISIONS = ("tensor parallel", "pipeline")
ROUNDS_PER_ORDER = 5
LEAST = 1.0  # times gloo's step over sirtaki's


def measure(options: Namespace) -> Results:
    """Runs everything. Times in milliseconds, of the rank that took longer."""
    with Job(hvdrun(RANKS), RANKS, "workers.model_parallel") as job:
        versions = job.ask("versions")[0]
        return {
            "versions": versions,
            "divisions": [measure_division(job, one, options.rounds) for one in DIVISIONS],
        }


def measure_division(job: Job, division: str, rounds: int) -> dict[str, Any]:
    facts = job.ask("prepare", division=division)[0]
    times: dict[str, list[float]] = {}
    for _ in range(0, rounds, ROUNDS_PER_ORDER):
        ranks = job.ask("rounds", count=ROUNDS_PER_ORDER)
        for backend in ranks[0]:
            slowest = map(max, *(rank[backend] for rank in ranks))
            times.setdefault(backend, []).extend(slowest)
    return {"division": division, **facts, "deviation": job.deviation(division), "times": times}


def show(results: Results) -> None:
    rows = []
    for one in results["divisions"]:
        times = one["times"]
        steps = [f"{median(times[backend]):.2f}" for backend in ("gloo", "sirtaki")]
        rows.append([one["division"], one["model"], *steps, f"{ratio(times['gloo'], times['sirtaki']):.2f}"])
    head = ["division", "model", "gloo, ms", "sirtaki, ms", "gloo / sirtaki (95 %)"]
    show_table(f"Training step of a divided model, {RANKS} ranks, one thread each", head, rows, 2)


def judge(results: Results) -> list[Target]:
    targets = []
    for one in results["divisions"]:
        speed = median(one["times"]["gloo"]) / median(one["times"]["sirtaki"])
        targets.append(at_least(f"step, gloo / sirtaki, {one['division']}", LEAST, speed))
    return targets


BENCHMARK = Benchmark(__doc__, [rounds(40, "steps of each kind")], measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
