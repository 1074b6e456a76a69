"""Compares a step of Keras' `model.fit` on two ranks with TensorFlow with TensorFlow's own strategy.

    python benchmarks/keras_step.py [--rounds 9] [--json FILE]

One pair of processes runs blocks of steps of each kind in turn. `fit alone` exchanges nothing: each rank
trains independently. `fit, sirtaki` is the same with a DistributedOptimizer. MultiWorkerMirroredStrategy's
`model.fit` does not run with Keras 3 (its error is shown), so its cost is measured with a loop: `loop, MWMS`
against `loop alone`.
"""

from __future__ import annotations

from typing import Any

from common.jobs import Job, hvdrun
from common.measure import Interval, median, median_interval
from common.options import parser
from common.ports import free_ports
from common.report import Target, at_most, save, show_machine, show_table, show_targets

MODELS = {"6 × Dense(1024), batch 16": (6, 1024), "100 × Dense(64), batch 16": (100, 64)}
RANKS = 2
STEPS_PER_BLOCK = 10
BESIDE = {"fit, sirtaki": "fit alone", "loop, MWMS": "loop alone"}


def main() -> None:
    options = parser(__doc__, 9, "blocks of each").parse_args()
    show_machine()
    results = measure(options.rounds)
    show(results)
    targets = judge(results)
    show_targets(targets)
    save(options.json, results, targets)


def measure(rounds: int) -> dict[str, Any]:
    """Runs everything; returns the contents of the JSON file. Times in milliseconds per step."""
    ports = ",".join(map(str, free_ports(RANKS)))
    settings = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    with Job(hvdrun(RANKS), RANKS, "workers.keras_step", ports, settings=settings) as job:
        versions = job.ask("versions")[0]
        models = [measure_model(job, model, rounds) for model in MODELS]
        failure = job.ask("fit_with_strategy")[0]
    return {"versions": versions, "models": models, "fit_with_strategy": failure}


def measure_model(job: Job, model: str, rounds: int) -> dict[str, Any]:
    layers, width = MODELS[model]
    facts = job.ask("prepare", layers=layers, width=width)[0]
    times: dict[str, list[float]] = {who: [] for who in facts.pop("who")}
    for _ in range(rounds):
        for who, blocks in times.items():
            blocks.append(max(job.ask("block", who=who, steps=STEPS_PER_BLOCK)))
    deviation = max(job.ask("deviation"))
    if not deviation < 1e-2:
        raise SystemExit(f"{model}: the weights of the exchanging models differ by {deviation:.2g}")
    costs = {
        who: median_interval([step - bare for step, bare in zip(times[who], times[alone], strict=True)])
        for who, alone in BESIDE.items()
    }
    return {"model": model, **facts, "deviation": deviation, "times": times, "costs": costs}


def show(results: dict[str, Any]) -> None:
    print(", ".join(f"{name} {version}" for name, version in results["versions"].items()))
    rows: list[list[str]] = []
    for model in results["models"]:
        rows.append([])
        for who, times in model["times"].items():
            cost = describe(model["costs"][who]) if who in model["costs"] else ""
            rows.append([model["model"] if who == "fit alone" else "", who, f"{median(times):.2f}", cost])
        title = f"{model['parameters'] / 1e6:.1f} M parameters in {model['tensors']} tensors"
        rows.append([title, "", "", ""])
    head = ["model", "step", "median ms", "what the exchange adds, ms (95 %)"]
    show_table(f"A step of Keras on TensorFlow, {RANKS} ranks", head, rows[1:], text_columns=2)
    print(f"model.fit with MultiWorkerMirroredStrategy: {results['fit_with_strategy']}")


def describe(cost: Interval) -> str:
    return f"{cost.median:.2f} ({cost.low:.2f} to {cost.high:.2f})"


def judge(results: dict[str, Any]) -> list[Target]:
    targets = []
    for model in results["models"]:
        mine, other = (model["costs"][who].median for who in BESIDE)
        targets.append(at_most(f"what the exchange adds, {model['model']}", other, mine, "ms"))
    return targets


if __name__ == "__main__":
    main()
