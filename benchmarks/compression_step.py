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
from common.host_steps import Blocks, measure_steps, show_steps, step_options
from common.report import Target, at_least

WORKER = "workers.compression_step"
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
    """Measures all compressions in turns."""
    return measure_steps(options, WORKER, make_rows)


def make_rows(model: str, found: dict[str, Blocks]) -> list[Row]:
    rows = []
    for name, blocks in found.items():
        last = blocks.answers[-1][0]
        share = last["sent"] / last["exact"] if last["exact"] else 0.0
        gain = found["none"].milliseconds / blocks.milliseconds
        rows.append(Row(model, name, blocks.milliseconds, gain, share, last["error"] if share else 0.0))
    return rows


def show(results: Results) -> None:
    show_steps(results, COLUMNS)


def judge(results: Results) -> list[Target]:
    """Returns the target for the model whose gradients take most of the step."""
    if results["rate"] != "1gbit":
        return []
    gains = [row.gain for row in results["rows"] if (row.model, row.compression) == PACE]
    return [at_least("speed of a step with powersgd(4), times that without", LEAST_GAIN, gains[0])]


BENCHMARK = Benchmark(__doc__, step_options(2, 5), measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
