"""Measures the exchange's cost in a training step, beside its peers, on two ranks of one thread each.

    python benchmarks/train_step.py [--rounds 40] [--json FILE]

One pair of processes runs a step of each kind in turn: `sync` (a barrier only, nothing is exchanged), DDP
over gloo, sirtaki, and a throw-away prototype (all gradients after the backward pass, in a fixed order,
without negotiation). The result is the median of the differences step - sync within a round. The second
measurement is the overlap: a backward pass that sleeps while gradients move.
"""

from __future__ import annotations

from typing import Any

from common import native
from common.jobs import Job, hvdrun
from common.measure import Interval, median, median_interval
from common.options import parser
from common.report import Target, at_most, save, show_machine, show_table, show_targets

MODELS = [
    "6 × Linear(2048), batch 16",
    "TransformerEncoder 12 × 256, batch 4 × 64",
    "200 × Linear(64), batch 16",
]
RANKS = 2
# glibc keeps freed memory in the process, up to its largest threshold of 32 MiB. By default it gives large
# gradients back to the system, and the order then decides which kind of step pays for new pages: 40 ms for
# 100 MB.
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
ROUNDS_PER_ORDER = 5
MOST = 1.3  # times what the prototype adds
LONGER, SHORTER = 2.0, 0.5  # compute as a multiple of the exchange


def main() -> None:
    options = parser(__doc__, 40, "steps of each kind").parse_args()
    show_machine()
    results = measure(options.rounds)
    show(results)
    targets = judge(results)
    show_targets(targets)
    save(options.json, results, targets)


def measure(rounds: int) -> dict[str, Any]:
    """Runs everything; returns the contents of the JSON file. Times in milliseconds."""
    folder = native.build()
    with Job(hvdrun(RANKS), RANKS, "workers.train_step", str(folder), settings=KEEP_MEMORY) as job:
        versions = job.ask("versions")[0]
        models = [measure_model(job, model, rounds) for model in MODELS]
    with Job(hvdrun(RANKS), RANKS, "workers.overlap") as job:
        overlap = [measure_overlap(job, factor, rounds // 3 + 3) for factor in (LONGER, SHORTER)]
    return {"versions": versions, "models": models, "overlap": overlap}


def measure_model(job: Job, model: str, rounds: int) -> dict[str, Any]:
    facts = job.ask("prepare", model=model)[0]
    times: dict[str, list[float]] = {}
    for _ in range(0, rounds, ROUNDS_PER_ORDER):
        ranks = job.ask("rounds", count=ROUNDS_PER_ORDER)
        for name in ranks[0]:
            means = [sum(of_ranks) / RANKS for of_ranks in zip(*(rank[name] for rank in ranks), strict=True)]
            times.setdefault(name, []).extend(means)
    deviation = max(job.ask("deviation"))
    if not deviation < 1e-2:
        raise SystemExit(f"{model}: the weights of the exchanging copies differ by {deviation:.2g}")
    sync = times["sync"]
    costs = {
        name: median_interval([step - bare for step, bare in zip(times[name], sync, strict=True)])
        for name in ("ddp", "sirtaki", "prototype")
    }
    return {"model": model, **facts, "deviation": deviation, "times": times, "costs": costs}


def measure_overlap(job: Job, factor: float, calls: int) -> dict[str, Any]:
    """Measures compute of `factor` times the exchange's time; blocks with and without exchange take turns."""
    exchange = rank_0(job, "exchange", calls=calls)
    pause = exchange * factor / job.ask("layers")[0] / 1e3
    rounds = []
    for _ in range(3):
        compute = rank_0(job, "compute", seconds=pause, calls=calls)
        step = rank_0(job, "step", seconds=pause, calls=calls)
        exchange = rank_0(job, "exchange", calls=calls)
        ddp = rank_0(job, "ddp_step", seconds=pause, calls=calls)
        row = {"compute": compute, "exchange": exchange, "step": step, "ddp": ddp}
        rounds.append({**row, "ratio": step / max(compute, exchange)})
    return {name: median([row[name] for row in rounds]) for name in rounds[0]}


def rank_0(job: Job, order: str, **arguments: Any) -> float:
    return job.ask(order, **arguments)[0]


def show(results: dict[str, Any]) -> None:
    print(", ".join(f"{name}: {version}" for name, version in results["versions"].items()))
    rows: list[list[str]] = []
    for model in results["models"]:
        sync = median(model["times"]["sync"])
        rows += [[], [model["model"], "sync", f"{sync:.2f}", "", ""]]
        for name, cost in model["costs"].items():
            share = f"{cost.median / sync:+.0%}"
            rows.append(["", name, f"{median(model['times'][name]):.2f}", describe(cost), share])
        title = f"{model['parameters'] / 1e6:.1f} M parameters in {model['tensors']} tensors"
        rows.append([title, "limit, one buffer", f"{median(model['times']['limit']):.2f}", "", ""])
    head = ["model", "exchange", "median ms", "step - sync, ms (95 %)", "over sync"]
    show_table(f"Training step, {RANKS} ranks, one thread each", head, rows[1:], text_columns=2)
    rows = [
        [f"{row[name]:.2f}" for name in ("compute", "exchange", "step", "ddp", "ratio")]
        for row in results["overlap"]
    ]
    head = ["compute ms", "exchange ms", "step ms", "DDP's step ms", "step / max(compute, exchange)"]
    show_table("Backward pass that sleeps while gradients move", head, rows, text_columns=0)


def describe(cost: Interval) -> str:
    return f"{cost.median:.2f} ({cost.low:.2f} to {cost.high:.2f})"


def judge(results: dict[str, Any]) -> list[Target]:
    targets = [judge_model(model) for model in results["models"]]
    for name, row in zip(("longer", "shorter"), results["overlap"], strict=True):
        what = f"backward sleeps {name} than the exchange: step / max(both)"
        targets.append(at_most(what, 1.1, row["ratio"], "×"))
    return targets


def judge_model(model: dict[str, Any]) -> Target:
    """Returns the bound: the prototype's added cost, with a margin, and 1 µs for each tensor."""
    bound = MOST * model["costs"]["prototype"].median + 0.001 * model["tensors"]
    what = f"step - sync, {model['model'].partition(',')[0]}"
    return at_most(what, bound, model["costs"]["sirtaki"].median, "ms")


if __name__ == "__main__":
    main()
