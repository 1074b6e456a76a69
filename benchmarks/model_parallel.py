"""Measures models that are divided over two ranks, over sirtaki and over gloo.

    python benchmarks/model_parallel.py [--rounds 40] [--json FILE]

A pair of processes of one thread each over gloo, and one over sirtaki, run some training steps in turns:
`tensor parallel` divides the weights of each pair of layers (DTensor), `pipeline` gives each rank half of the
layers (1F1B). The weights that both backends lead to are compared. Each backend has processes of its own,
because torch takes two meshes of the same ranks for one, and sends everything over the first one's group.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from common.harness import Benchmark, Results
from common.jobs import KEEP_MEMORY, Job, hvdrun
from common.measure import median, ratio
from common.options import rounds
from common.report import Target, at_least, show_table

RANKS = 2
DIVISIONS = ("tensor parallel", "pipeline")
BACKENDS = ("gloo", "sirtaki")
ROUNDS_PER_ORDER = 5
LEAST = 1.0  # times gloo's step over sirtaki's


def measure(options: Namespace) -> Results:
    """Runs everything. Times in milliseconds, of the rank that took longer."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        jobs = {
            backend: stack.enter_context(
                Job(hvdrun(RANKS), RANKS, "workers.model_parallel", backend, settings=KEEP_MEMORY)
            )
            for backend in BACKENDS
        }
        divisions = [measure_division(jobs, one, options.rounds, f"{folder}/{one}") for one in DIVISIONS]
        return {"versions": jobs["sirtaki"].ask("versions")[0], "divisions": divisions}


def measure_division(jobs: Mapping[str, Job], division: str, rounds: int, file: str) -> dict[str, Any]:
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


def show(results: Results) -> None:
    rows = []
    for one in results["divisions"]:
        times = one["times"]
        steps = [f"{median(times[backend]):.2f}" for backend in BACKENDS]
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
