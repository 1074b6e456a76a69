"""Measures the exchange's cost in a training step, beside its peers, on two ranks of one thread each.

    python benchmarks/train_step.py [--rounds 40] [--keep-gradients] [--json FILE]

One pair of processes runs a step of each kind in turn: `sync` (a barrier only, nothing is exchanged), DDP
over gloo, sirtaki, sirtaki with gradients in shared memory, and a throw-away prototype (all gradients after
the backward pass, in a fixed order, without negotiation). The result is the median of the differences
step - sync within a round. The second measurement is the overlap: a backward pass that sleeps while
gradients move.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

from common import native
from common.harness import Benchmark, Results
from common.jobs import KEEP_MEMORY, Job, hvdrun
from common.measure import alternate, difference, median
from common.options import Option, rounds
from common.report import Target, at_most, show_rows, show_table

MODELS = [
    "6 × Linear(2048), batch 16",
    "TransformerEncoder 12 × 256, batch 4 × 64",
    "200 × Linear(64), batch 16",
]
RANKS = 2
ROUNDS_PER_ORDER = 5
NO_EXCHANGES = ("sync", "memory bound")  # what is measured beside them
MOST = 1.3  # times what the prototype adds
OVERLAPS = {"longer": 2.0, "shorter": 0.5}  # compute as a multiple of the exchange
OVERLAP_ROUNDS = 3

OVERLAP_COLUMNS = [
    ("compute ms", lambda row: f"{row['compute']:.2f}"),
    ("exchange ms", lambda row: f"{row['exchange']:.2f}"),
    ("step ms", lambda row: f"{row['step']:.2f}"),
    ("DDP's step ms", lambda row: f"{row['ddp']:.2f}"),
    ("step / max(compute, exchange)", lambda row: f"{row['ratio']:.2f}"),
]


def measure(options: Namespace) -> Results:
    """Runs everything. Times in milliseconds."""
    folder, rounds = str(native.build()), options.rounds
    with Job(hvdrun(RANKS), RANKS, "workers.train_step", folder, settings=KEEP_MEMORY) as job:
        versions = job.ask("versions")[0]
        models = [measure_model(job, model, rounds, options.keep_gradients) for model in MODELS]
    with Job(hvdrun(RANKS), RANKS, "workers.overlap") as job:
        overlap = [measure_overlap(job, factor, rounds // 3 + 3) for factor in OVERLAPS.values()]
    return {"versions": versions, "models": models, "overlap": overlap}


def measure_model(job: Job, model: str, rounds: int, keeps_gradients: bool = False) -> dict[str, Any]:
    facts = job.ask("prepare", model=model, keeps_gradients=keeps_gradients)[0]
    times: dict[str, list[float]] = {}
    for _ in range(0, rounds, ROUNDS_PER_ORDER):
        ranks = job.ask("rounds", count=ROUNDS_PER_ORDER)
        for name in ranks[0]:
            means = [sum(of_ranks) / RANKS for of_ranks in zip(*(rank[name] for rank in ranks), strict=True)]
            times.setdefault(name, []).extend(means)
    deviation = job.deviation(model)
    exchanges = [name for name in times if name not in NO_EXCHANGES]
    costs = {name: difference(times[name], times["sync"]) for name in exchanges}
    return {"model": model, **facts, "deviation": deviation, "times": times, "costs": costs}


def measure_overlap(job: Job, factor: float, calls: int) -> dict[str, Any]:
    """Measures compute of `factor` times the exchange's time; blocks with and without exchange take turns."""

    def rank_0(order: str, **arguments: Any) -> float:
        return job.ask(order, calls=calls, **arguments)[0]

    pause = rank_0("exchange") * factor / job.ask("layers")[0] / 1e3
    times = alternate(
        {
            "compute": partial(rank_0, "compute", seconds=pause),
            "step": partial(rank_0, "step", seconds=pause),
            "exchange": partial(rank_0, "exchange"),
            "ddp": partial(rank_0, "ddp_step", seconds=pause),
        },
        OVERLAP_ROUNDS,
    )
    parts = zip(times["step"], times["compute"], times["exchange"], strict=True)
    times["ratio"] = [step / max(compute, exchange) for step, compute, exchange in parts]
    return {name: median(found) for name, found in times.items()}


def show(results: Results) -> None:
    show_models(results["models"])
    title = "Backward pass that sleeps while gradients move"
    show_rows(title, OVERLAP_COLUMNS, results["overlap"], text_columns=0)


def show_models(models: list[dict[str, Any]]) -> None:
    """Prints the steps of each model with each exchange."""
    rows: list[list[str]] = []
    for model in models:
        sync = median(model["times"]["sync"])
        rows += [[], [model["model"], "sync", f"{sync:.2f}", "", ""]]
        for name, cost in model["costs"].items():
            share = f"{cost.median / sync:+.0%}"
            rows.append(["", name, f"{median(model['times'][name]):.2f}", f"{cost:.2f}", share])
        title = f"{model['parameters'] / 1e6:.1f} M parameters in {model['tensors']} tensors"
        bound = f"{median(model['times']['memory bound']):.2f}"
        rows.append([title, "memory bound, one buffer", bound, "", ""])
    head = ["model", "exchange", "median ms", "step - sync, ms (95 %)", "over sync"]
    show_table(f"Training step, {RANKS} ranks, one thread each", head, rows[1:], text_columns=2)


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
BENCHMARK = Benchmark(__doc__, [rounds(40, "steps of each kind"), KEEP], measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
