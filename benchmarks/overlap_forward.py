"""Measures a training step between hosts with and without overlap_forward.

    sudo python benchmarks/overlap_forward.py [--hosts 2] [--rate 1gbit] [--steps 10] [--partition-bytes 512K]
                                              [--models vgg "vgg elsewhere"] [--json FILE]

The hosts are network namespaces on a bridge, each with one rank and its own link of the given rate (tc tbf;
"none": as fast as the kernel allows). "alone" is the step without any exchange, "synchronous" sends gradients
in the order in which the backward pass makes them, while it runs. Blocks take turns. The models:

vgg            a convolutional network with the proportions of VGG: nearly all parameters in the last layers
transformer    12 layers of equal size
vgg elsewhere  the parameters of vgg, in layers that wait for as long as their computation would take, so that
               the exchange has the processor for itself

No step with exchange can be shorter than "alone", or than the time of its bytes on the link.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from common.harness import Benchmark, Results
from common.host_steps import Blocks, measure_steps, show_steps, step_options
from common.measure import median
from common.options import Option, choice
from common.report import Target, at_least

WORKER = "workers.overlap_forward"
LEAST_GAIN = 1.3  # times the synchronous step's speed, on a link of 1 Gbit/s: P3's for ResNet-50 and Sockeye
LEAST_ANYWHERE = 0.98
MODELS = ["vgg", "transformer", "vgg elsewhere"]
GAINING = ("vgg", "vgg elsewhere")  # models whose last layers have the parameters


@dataclass
class Row:
    """The result of one way of exchanging gradients."""

    model: str
    way: str
    milliseconds: float  # median of a step, on the slower rank
    processor: float  # milliseconds per step that a rank's threads run, in the program and in the kernel
    gain: float  # synchronous time divided by this one's
    difference: float  # of the parameters from those of synchronous steps


COLUMNS = [
    ("model", lambda row: row.model),
    ("way", lambda row: row.way),
    ("step ms", lambda row: f"{row.milliseconds:,.1f}"),
    ("processor ms", lambda row: f"{row.processor:,.0f}"),
    ("synchronous time / its time", lambda row: f"{row.gain:.2f}"),
    ("difference", lambda row: f"{row.difference:g}"),
]


def measure(options: Namespace) -> Results:
    """Measures all ways in turns."""
    settings = {"SIRTAKI_PARTITION_BYTES": options.partition_bytes}
    results = measure_steps(options, WORKER, make_rows, settings)
    return {**results, "partition_bytes": options.partition_bytes}


def make_rows(model: str, found: dict[str, Blocks]) -> list[Row]:
    return [
        Row(
            model,
            way,
            blocks.milliseconds,
            median(rank["processor"] for ranks in blocks.answers for rank in ranks),
            found["synchronous"].milliseconds / blocks.milliseconds,
            max(rank.get("deviation", 0.0) for ranks in blocks.answers for rank in ranks),
        )
        for way, blocks in found.items()
    ]


def show(results: Results) -> None:
    show_steps(results, COLUMNS)


def judge(results: Results) -> list[Target]:
    """Returns the target for models whose last layers have the parameters, and those for all."""
    gains = {row.model: row.gain for row in results["rows"] if row.way == "overlap_forward"}
    targets = [
        at_least(f"speed of {name}, times synchronous", LEAST_ANYWHERE, gain) for name, gain in gains.items()
    ]
    if results["rate"] == "1gbit":
        targets += [
            at_least(f"speed of {name} at 1 Gbit/s, times synchronous", LEAST_GAIN, gains[name])
            for name in GAINING
            if name in gains
        ]
    return targets


OPTIONS = [
    *step_options(3, 10),
    choice("--models", MODELS, "which models (all)"),
    Option("--partition-bytes", default="512K", help="largest part of a gradient (512K)"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
