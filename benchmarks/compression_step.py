"""Measures a training step between hosts with each compression of gradients.

    sudo python benchmarks/compression_step.py [--hosts 2] [--rate 1gbit] [--steps 5] [--json FILE]

The hosts are network namespaces on a bridge, each with one rank and its own link of the given rate (tc tbf;
"none": as fast as the kernel allows). "alone" is the step without any exchange. The models are six layers of
2,048 units (100 MB of gradients in 12 tensors), where the link takes the time, and a transformer (38 MB in
144 tensors). Each compression begins anew in each block of steps, and blocks take turns.
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

WORKER = "workers.compression_step"
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
PORT = 29_800
PACE = ("linear", "powersgd(4)")  # the row that has a target
LEAST_GAIN = 1.5  # times the uncompressed step's speed, on a link of 1 Gbit/s


@dataclass
class Row:
    """The result of one compression."""

    model: str
    compression: str
    milliseconds: float  # median of a step, on the slower rank
    gain: float  # uncompressed time divided by this one's
    share: float  # of the compressed gradients' bytes that were sent; 0 if none was compressed
    error: float


COLUMNS = [
    ("model", lambda row: row.model),
    ("compression", lambda row: row.compression),
    ("step ms", lambda row: f"{row.milliseconds:,.1f}"),
    ("none's time / its time", lambda row: f"{row.gain:.2f}"),
    ("bytes sent", lambda row: f"{row.share:.2%}" if row.share else ""),
    ("left out", lambda row: f"{row.error:.2f}" if row.share else ""),
]


def measure(options: Namespace) -> Results:
    """Creates the hosts and measures all compressions in turns."""
    with hosts_of(options) as (hosts, key):
        launcher = ranks_on(hosts, 1, key, PORT)
        with Job(launcher, options.hosts, WORKER, settings=KEEP_MEMORY) as job:
            versions = job.ask("versions")[0]
            choices = job.ask("choices")[0]
            names = choices["compressions"]
            rows = [row for model in choices["models"] for row in measure_model(job, model, names, options)]
    facts = {"hosts": options.hosts, "rate": options.rate}
    return {**facts, "versions": versions, "rows": rows}


def measure_model(job: Job, model: str, names: list[str], options: Namespace) -> list[Row]:
    times: dict[str, list[float]] = {name: [] for name in names}
    shares, errors = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for _ in range(options.rounds):
        for name in names:
            job.ask("prepare", model=model, compression=name)
            ranks = job.ask("steps", calls=options.steps)
            times[name] += [max(step) for step in zip(*(rank["times"] for rank in ranks), strict=True)]
            if ranks[0]["exact"]:
                shares[name] = ranks[0]["sent"] / ranks[0]["exact"]
                errors[name] = ranks[0]["error"]
    found = {name: median(steps) / 1e3 for name, steps in times.items()}
    return [
        Row(model, name, time, found["none"] / time, shares[name], errors[name])
        for name, time in found.items()
    ]


def show(results: Results) -> None:
    title = f"Training step, {results['hosts']} hosts × 1 rank, links of {results['rate']}"
    show_rows(title, COLUMNS, results["rows"], text_columns=2, group=lambda row: row.model)


def judge(results: Results) -> list[Target]:
    """Returns the target for the model whose gradients take most of the step."""
    if results["rate"] != "1gbit":
        return []
    gains = [row.gain for row in results["rows"] if (row.model, row.compression) == PACE]
    return [at_least("speed of a step with powersgd(4), times that without", LEAST_GAIN, gains[0])]


OPTIONS = [
    rounds(2, "blocks of each"),
    *HOST_OPTIONS,
    number("--steps", 5, "steps of a block"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
