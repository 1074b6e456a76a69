"""Measures local SGD and DiLoCo: steps over a limited link, and the loss of a small language model.

    sudo python benchmarks/local_steps.py [--hosts 2] [--rate 1gbit] [--json FILE]
    python benchmarks/local_steps.py --only losses [-np 2] [--updates 1500] [--rounds 3] [--methods ...]

Steps: hosts are network namespaces on a bridge, each with one rank and its own link of the given rate. A step
is the mean over complete windows. Losses: a language model of characters learns the topics of pydoc, in as
many steps with each way to exchange. Each round has another seed, for the model and the ranks' data. The
ranks share a host but not its memory, so int8 rounds as it does between hosts. Noise is the difference
between the largest and the smallest loss of synchronous training. DiLoCo(0.1) has an outer rate of 0.1, not
the paper's 0.7: differences after few steps point the same way, and momentum multiplies them by up to 10.
DiLoCo(3 %) and DiLoCo(1 %) send the largest differences only, and have an outer rate of 1 without momentum.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median
from common.options import RANKS, Option, choice, number, rounds
from common.over_hosts import HOST_OPTIONS, hosts_of, ranks_on
from common.report import Target, at_least, at_most, show_rows

WORKER = "workers.local_steps"
PORT = 29_900
EVERY = (1, 10, 100)
WINDOWED = ("LocalSGD", "DiLoCo")
GENTLE = "DiLoCo(0.1)"
SPARSE = ("DiLoCo(3 %)", "DiLoCo(1 %)")
COMPRESSED = [("int8", 1), ("powersgd", 1)]
METHODS = (*WINDOWED, GENTLE, *SPARSE, *(method for method, _ in COMPRESSED))
MODELS = ("linear", "transformer")
LEAST_GAIN = 3.0  # times the synchronous step's speed, of the linear model with LocalSGD and every=100
SETTINGS = {"SIRTAKI_TRANSPORT": "socket"}  # of trainings


@dataclass
class StepRow:
    """The mean step of one method."""

    model: str
    method: str
    every: int
    milliseconds: float
    gain: float  # synchronous time divided by this one's
    megabytes: float  # combined in a step, on one rank


@dataclass
class LossRow:
    """The trainings of one method."""

    method: str
    every: int
    losses: list[float]  # by seed
    mean: float
    excess: float  # over the mean of synchronous training
    kilobytes: float  # that a rank sends in an exchange


def name_of(row: StepRow | LossRow) -> str:
    return f"{row.method}, every={row.every}" if row.method in (*WINDOWED, GENTLE, *SPARSE) else row.method


def ways_of(options: Namespace, methods: Sequence[str] = WINDOWED) -> list[tuple[str, int]]:
    """Returns the methods with local steps, each with its steps between two exchanges."""
    windowed = [method for method in (*WINDOWED, GENTLE, *SPARSE) if method in methods]
    return [("synchronous", 1), *((method, every) for method in windowed for every in options.every)]


STEP_COLUMNS = [
    ("model", lambda row: row.model),
    ("training", name_of),
    ("step ms", lambda row: f"{row.milliseconds:,.1f}"),
    ("synchronous time / its time", lambda row: f"{row.gain:.2f}"),
    ("MB combined in a step", lambda row: f"{row.megabytes:.2f}"),
]
LOSS_COLUMNS = [
    ("training", name_of),
    ("loss by seed", lambda row: "  ".join(f"{loss:.3f}" for loss in row.losses)),
    ("mean", lambda row: f"{row.mean:.3f}"),
    ("over synchronous", lambda row: f"{row.excess:+.3f}"),
    ("KB sent in an exchange", lambda row: f"{row.kilobytes:,.0f}"),
]


def measure(options: Namespace) -> Results:
    """Measures both parts, or one of them."""
    steps, losses = [], []
    versions: dict[str, str] = {}
    if "steps" in options.only:
        with hosts_of(options) as (hosts, key), Job(ranks_on(hosts, 1, key, PORT), len(hosts), WORKER) as job:
            versions = job.ask("versions")[0]
            steps = [row for model in options.models for row in measure_steps(job, model, options)]
    if "losses" in options.only:
        with Job(hvdrun(options.ranks), options.ranks, WORKER, settings=SETTINGS) as job:
            versions = job.ask("versions")[0]
            losses = measure_losses(job, options)
    facts = {"hosts": options.hosts, "rate": options.rate, "ranks": options.ranks, "updates": options.updates}
    return {**facts, "versions": versions, "steps": steps, "losses": losses}


def measure_steps(job: Job, model: str, options: Namespace) -> list[StepRow]:
    """Takes steps by all methods, in turns."""
    times: dict[tuple[str, int], list[float]] = {way: [] for way in ways_of(options)}
    combined = {}
    for _ in range(options.rounds):
        for method, every in times:
            ranks = job.ask("steps", model=model, method=method, every=every, least=options.steps)
            times[method, every].append(max(rank["seconds"] for rank in ranks) * 1e3)
            combined[method, every] = ranks[0]["bytes"] / 1e6
    found = {way: median(measured) for way, measured in times.items()}
    plain = found["synchronous", 1]
    return [StepRow(model, *way, time, plain / time, combined[way]) for way, time in found.items()]


def measure_losses(job: Job, options: Namespace) -> list[LossRow]:
    """Trains by all methods, in turns."""
    compressed = [way for way in COMPRESSED if way[0] in options.methods]
    losses: dict[tuple[str, int], list[float]] = {
        way: [] for way in [*ways_of(options, options.methods), *compressed]
    }
    sent = {}
    for seed in range(options.rounds):
        for method, every in losses:
            ranks = job.ask("train", method=method, every=every, updates=options.updates, seed=seed)
            losses[method, every].append(ranks[0]["loss"])
            sent[method, every] = ranks[0]["sent"] / 1e3
    means = {way: sum(found) / len(found) for way, found in losses.items()}
    plain = means["synchronous", 1]
    return [LossRow(*way, found, means[way], means[way] - plain, sent[way]) for way, found in losses.items()]


def show(results: Results) -> None:
    if results["steps"]:
        title = f"Training step, {results['hosts']} hosts × 1 rank, links of {results['rate']}"
        show_rows(title, STEP_COLUMNS, results["steps"], text_columns=2, group=lambda row: row.model)
    if results["losses"]:
        title = (
            f"Language model, {results['ranks']} ranks, {results['updates']} steps: loss in nats a character"
        )
        show_rows(title, LOSS_COLUMNS, results["losses"], text_columns=2)


def judge(results: Results) -> list[Target]:
    """Returns the gain over a link of 1 Gbit/s, and which losses are within the noise."""
    targets = []
    if results["rate"] == "1gbit":
        gains = {(row.model, row.method, row.every): row.gain for row in results["steps"]}
        if found := gains.get(("linear", "LocalSGD", 100)):
            targets.append(
                at_least("speed of a step with LocalSGD, every=100, times synchronous", LEAST_GAIN, found)
            )
    if results["losses"] and len(results["losses"][0].losses) > 1:
        noise = max(results["losses"][0].losses) - min(results["losses"][0].losses)
        targets += [
            at_most(f"loss of {name_of(row)}, over synchronous", noise, row.excess, "nats")
            for row in results["losses"][1:]
        ]
    return targets


OPTIONS = [
    choice("--only", ("steps", "losses"), "what to measure (both)"),
    choice("--models", MODELS, "models of the steps (both)"),
    choice("--methods", METHODS, "trainings beside synchronous ones (all)"),
    Option("--every", type=int, nargs="+", default=EVERY, help="steps between two exchanges (1 10 100)"),
    RANKS,
    *HOST_OPTIONS,
    number("--steps", 10, "steps of a block at least; whole windows are taken"),
    number("--updates", 1500, "steps of a training"),
    rounds(3, "blocks of each way, and seeds of trainings"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
