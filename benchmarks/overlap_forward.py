"""Measures a training step between hosts with and without overlap_forward.

    sudo python benchmarks/overlap_forward.py [--hosts 2] [--rate 1gbit] [--steps 10] [--json FILE]

The hosts are network namespaces on a bridge, each with one rank and its own link of the given rate (tc tbf;
"none": as fast as the kernel allows). "alone" is the step without any exchange, "synchronous" sends gradients
in the order in which the backward pass makes them, while it runs. The models are a convolutional network with
the proportions of VGG, whose last layers have nearly all parameters, and a transformer. Blocks take turns.
No step of the exchange can be shorter than the computation, or than the time of its bytes on the link.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from common.harness import Benchmark, Results
from common.jobs import Job
from common.measure import median
from common.options import number, rounds
from common.over_hosts import HOST_OPTIONS, hosts_of, ranks_on
from common.report import Target, at_least, show_rows

WORKER = "workers.overlap_forward"
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
PORT = 29_840
LEAST_GAIN = 1.3  # times the synchronous step's speed, on a link of 1 Gbit/s: P3's for ResNet-50 and Sockeye
LEAST_ANYWHERE = 0.98


@dataclass
class Row:
    """The result of one way of exchanging gradients."""

    model: str
    way: str
    milliseconds: float  # median of a step, on the slower rank
    gain: float  # synchronous time divided by this one's
    difference: float  # of the parameters from those of synchronous steps


COLUMNS = [
    ("model", lambda row: row.model),
    ("way", lambda row: row.way),
    ("step ms", lambda row: f"{row.milliseconds:,.1f}"),
    ("synchronous time / its time", lambda row: f"{row.gain:.2f}"),
    ("difference", lambda row: f"{row.difference:g}"),
]


def measure(options: Namespace) -> Results:
    """Creates the hosts and measures all ways in turns."""
    with hosts_of(options) as (hosts, key):
        launcher = ranks_on(hosts, 1, key, PORT)
        with Job(launcher, options.hosts, WORKER, settings=KEEP_MEMORY) as job:
            versions = job.ask("versions")[0]
            choices = job.ask("choices")[0]
            ways = choices["ways"]
            rows = [row for model in choices["models"] for row in measure_model(job, model, ways, options)]
    return {"hosts": options.hosts, "rate": options.rate, "versions": versions, "rows": rows}


def measure_model(job: Job, model: str, ways: list[str], options: Namespace) -> list[Row]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    difference = 0.0
    for _ in range(options.rounds):
        for way in ways:
            job.ask("prepare", model=model, way=way)
            ranks = job.ask("steps", calls=options.steps)
            times[way] += [max(step) for step in zip(*(rank["times"] for rank in ranks), strict=True)]
        difference = max(difference, *job.ask("deviation"))
    found = {way: median(steps) / 1e3 for way, steps in times.items()}
    return [
        Row(model, way, time, found["synchronous"] / time, difference if way == "overlap_forward" else 0.0)
        for way, time in found.items()
    ]


def show(results: Results) -> None:
    title = f"Training step, {results['hosts']} hosts × 1 rank, links of {results['rate']}"
    show_rows(title, COLUMNS, results["rows"], text_columns=2, group=lambda row: row.model)


def judge(results: Results) -> list[Target]:
    """Returns the target for the model whose last layers have the parameters, and those for all."""
    gains = {row.model: row.gain for row in results["rows"] if row.way == "overlap_forward"}
    targets = [
        at_least(f"speed of {name}, times synchronous", LEAST_ANYWHERE, gain) for name, gain in gains.items()
    ]
    if results["rate"] == "1gbit":
        targets.append(at_least("speed of vgg at 1 Gbit/s, times synchronous", LEAST_GAIN, gains["vgg"]))
    return targets


OPTIONS = [
    rounds(3, "blocks of each"),
    *HOST_OPTIONS,
    number("--steps", 10, "steps of a block"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
