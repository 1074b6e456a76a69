"""Compares a step of Keras' `model.fit` on two ranks with TensorFlow with TensorFlow's own strategy.

    python benchmarks/keras_step.py [--rounds 9] [--json FILE]

One pair of processes runs blocks of steps of each kind in turn. `fit alone` exchanges nothing: each rank
trains independently. `fit, sirtaki` is the same with a DistributedOptimizer. MultiWorkerMirroredStrategy's
`model.fit` does not run with Keras 3, so its cost is measured with a loop: `loop, MWMS`
against `loop alone`.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from common.harness import Benchmark, Results
from common.jobs import Job, free_ports, hvdrun
from common.measure import difference, median
from common.options import rounds
from common.report import Table, Target, at_most, optional

MODELS = {"6 × Dense(1024), batch 16": (6, 1024), "100 × Dense(64), batch 16": (100, 64)}
RANKS = 2
STEPS_PER_BLOCK = 10
BESIDE = {"fit, sirtaki": "fit alone", "loop, MWMS": "loop alone"}


def measure(options: Namespace) -> Results:
    """Runs everything. Times in milliseconds per step."""
    ports = ",".join(map(str, free_ports(RANKS)))
    settings = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    with Job(hvdrun(RANKS), RANKS, "workers.keras_step:KerasRank", ports, settings=settings) as job:
        versions = job.ask("versions")[0]
        models = [measure_model(job, model, options.rounds) for model in MODELS]
    return {"versions": versions, "models": models}


def measure_model(job: Job, model: str, rounds: int) -> dict[str, Any]:
    layers, width = MODELS[model]
    facts = job.ask("prepare", layers=layers, width=width)[0]
    blocks = job.blocks(facts.pop("who"), rounds, STEPS_PER_BLOCK)
    times = {who: [step for block in measured for step in block] for who, measured in blocks.items()}
    deviation = job.deviation(model)
    costs = {who: difference(times[who], times[alone]) for who, alone in BESIDE.items()}
    return {"model": model, **facts, "deviation": deviation, "times": times, "costs": costs}


def tables(results: Results) -> list[Table]:
    rows: list[list[str]] = []
    for model in results["models"]:
        rows.append([])
        for who, times in model["times"].items():
            cost = optional(model["costs"].get(who), ".2f")
            rows.append([model["model"], who, f"{median(times):.2f}", cost])
        title = f"{model['parameters'] / 1e6:.1f} M parameters in {model['tensors']} tensors"
        rows.append([title, "", "", ""])
    head = ["model", "step", "median ms", "what the exchange adds, ms (95 %)"]
    return [Table(f"A step of Keras on TensorFlow, {RANKS} ranks", head, rows[1:], text_columns=2)]


def judge(results: Results) -> list[Target]:
    targets = []
    for model in results["models"]:
        own, strategy = (model["costs"][who].median for who in BESIDE)
        targets.append(at_most(f"what the exchange adds, {model['model']}", strategy, own, "ms"))
    return targets


BENCHMARK = Benchmark(__doc__, [rounds(9, "blocks of each")], measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
