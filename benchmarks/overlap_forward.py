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
from common.host_steps import Blocks, measure_steps, show_steps, step_options
from common.report import Target, at_least

WORKER = "workers.overlap_forward"
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
    """Measures all ways in turns."""
    return measure_steps(options, WORKER, make_rows)


def make_rows(model: str, found: dict[str, Blocks]) -> list[Row]:
    return [
        Row(
            model,
            way,
            blocks.milliseconds,
            found["synchronous"].milliseconds / blocks.milliseconds,
            max(rank.get("deviation", 0.0) for ranks in blocks.answers for rank in ranks),
        )
        for way, blocks in found.items()
    ]


def show(results: Results) -> None:
    show_steps(results, COLUMNS)


def judge(results: Results) -> list[Target]:
    """Returns the target for the model whose last layers have the parameters, and those for all."""
    gains = {row.model: row.gain for row in results["rows"] if row.way == "overlap_forward"}
    targets = [
        at_least(f"speed of {name}, times synchronous", LEAST_ANYWHERE, gain) for name, gain in gains.items()
    ]
    if results["rate"] == "1gbit":
        targets.append(at_least("speed of vgg at 1 Gbit/s, times synchronous", LEAST_GAIN, gains["vgg"]))
    return targets


BENCHMARK = Benchmark(__doc__, step_options(3, 10), measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
