"""Draws the results of the benchmarks as the pictures of docs/pictures, one for each file.

    python benchmarks/sharding.py --json build/sharding.json
    python benchmarks/plot.py build/sharding.json [more files] [--folder docs/pictures]

A file comes from a benchmark of the table PICTURES. matplotlib is required.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common.measure import median, quantile
from common.options import KIB, Option, parse
from common.pictures import BLUE, GREEN, ORANGE, PLAIN, RED, SKY, Bars, Line, Lines, Measured, Picture
from common.report import Row, readable

FOLDER = Option(
    "--folder",
    type=Path,
    default=Path(__file__).parents[1] / "docs" / "pictures",
    help="where to (docs/pictures)",
)
FILES = Option("files", type=Path, nargs="+", metavar="FILE", help="what a benchmark has written with --json")
LARGE = 1 << 20  # bytes, from which a simulated all-reduce is the one of the picture
STEPS = {
    "linear": ("6 × Linear(2048), 100 MB of gradients", BLUE),
    "transformer": ("transformer, 38 MB of gradients", ORANGE),
}
SLOW = {
    "none": "no rank is slow",
    "one": "the last rank is\ntwice as slow",
    "each": "another rank in each\nstep",
}
SHARDS = {
    "none": ("plain", PLAIN),
    "state": ('shard="state" (ZeRO-1)', BLUE),
    "gradients": ('shard="gradients" (ZeRO-2)', ORANGE),
}


def main() -> None:
    options = parse(__doc__, [FILES, FOLDER])
    for file in options.files:
        measured = json.loads(file.read_text())
        picture = PICTURES.get(Path(measured["command"][0]).name)
        if picture is None:
            sys.exit(f"{file} holds no results that have a picture")
        print("wrote", picture.draw(measured, measured["machine"], options.folder))


def place_of(measured: Measured) -> str:
    """Describes the hosts of a measurement, and the links between them."""
    rate = measured["rate"]
    links = "links without a limit" if rate == "none" else f"links of {rate.replace('gbit', ' Gbit/s')}"
    return f"{measured['hosts']} hosts, {links}"


def short(model: str) -> str:
    return (
        model.partition(", ")[0]
        .replace("TransformerEncoder ", "Transformer\n")
        .replace(" × Linear", " ×\nLinear")
    )


def local_name(row: Row) -> str:
    windowed = "Local" in row["method"] or "DiLoCo" in row["method"]
    return f"{row['method']},\nevery={row['every']}" if windowed else row["method"]


def costs(measured: Measured) -> list[Row]:
    """Returns what each exchange adds to a step, in percent of the step without, with its interval."""
    return [
        {
            "model": model["model"],
            "who": who,
            "cost": [100 * bound / median(model["times"]["sync"]) for bound in cost],
        }
        for model in measured["models"]
        for who, cost in model["costs"].items()
    ]


def divisions(measured: Measured) -> list[Row]:
    """Returns the median and the 5 % and 95 % quantiles of a step of each division over each backend."""
    return [
        {"division": one["division"], "backend": backend, "median": median(times)}
        | {"bounds": [quantile(times, 0.05), quantile(times, 0.95)]}
        for one in measured["divisions"]
        for backend, times in one["times"].items()
    ]


def recoveries(measured: Measured) -> list[Row]:
    """Returns the seconds of each launcher's recoveries."""
    found = {name: [kill["seconds"] for kill in measured[name]["kills"]] for name in ("sirtaki", "torchrun")}
    return [{"launcher": name, "seconds": seconds} for name, seconds in found.items() if seconds]


def bandwidth(who: str, label: str, color: str, style: str = "-") -> Line:
    """Returns the bus bandwidth of an implementation, by size."""

    def points(measured: Measured) -> list[tuple[float, float]]:
        rows = [row for row in measured["rows"] if row["who"] == who and row["bytes"] >= KIB]
        return [(row["bytes"], row["busbw"]) for row in rows if row["collective"] == "allreduce"]

    return Line(label, color, points, style)


# Parts of the simulation: section, key of the step or the kind of row, label, colour, style, and the keys of
# the values of the three axes, of which the first is in microseconds but for init().
SIMULATED = (
    ("negotiation", "steady", "negotiation (rank 0 receives)", BLUE, "-", "latency", "frames_in", "bytes_in"),
    ("negotiation", "first", "its first step", SKY, "-", "latency", "frames_in", "bytes_in"),
    ("allreduce", "", "64 MiB all-reduce (a host sends)", GREEN, "-", "microseconds", "frames", "bytes"),
    ("start", "", "init() (the rendezvous sends)", ORANGE, "-", "seconds", "sent_frames", "sent_by_server"),
    ("loss", False, "lost process (all send)", RED, "-", "last", "frames", "bytes"),
    ("loss", True, "lost host (all send)", RED, "--", "last", "frames", "bytes"),
)


def simulated(name: str, axis: int) -> Lines:
    """Returns one of the three axes: seconds, frames or bytes by the number of ranks."""

    def line(section: str, part: str | bool, label: str, color: str, style: str, *keys: str) -> Line:
        key = keys[axis]
        unit = 1e-6 if axis == 0 and key != "seconds" else 1.0

        def points(measured: Measured) -> list[tuple[float, float]]:
            rows = [row for row in measured.get(section, []) if row.get("size", LARGE) >= LARGE]
            rows = [row for row in rows if section != "loss" or bool(row["host"]) == part]
            return [(row["ranks"], row.get(part, row)[key] * unit) for row in rows]

        return Line(label, color, points, style)

    return Lines([line(*row) for row in SIMULATED], "ranks", name, lambda ranks: f"{ranks:,.0f}", True)


PICTURES = {
    "collectives.py": Picture(
        "allreduce.png",
        lambda measured: f"All-reduce, float32 sum in place, {measured['ranks']} ranks on one host",
        Lines(
            [
                bandwidth("sirtaki torch", "sirtaki", BLUE),
                bandwidth("memory bound", "memory-bound prototype", PLAIN, ":"),
                bandwidth("mpi", "Open MPI", ORANGE),
                bandwidth("gloo", "gloo", GREEN),
            ],
            "size",
            "bus bandwidth, GB/s",
            lambda size: readable(int(size)),
        ),
        legend_columns=4,
    ),
    "train_step.py": Picture(
        "train_step.png",
        lambda _: "What exchanging gradients costs, 2 ranks, one thread each",
        Bars(
            {
                "ddp": ("DDP over gloo", GREEN),
                "prototype": ("prototype", PLAIN),
                "sirtaki": ("sirtaki", BLUE),
            },
            lambda row: row["who"],
            lambda row: short(row["model"]),
            lambda row: row["cost"][0],
            "added to a step without exchange, %\n(thin lines: 95 % interval)",
            "{height:+.0f} %",
            interval=lambda row: row["cost"][1:],
            rows=costs,
        ),
        legend_columns=3,
    ),
    "recovery.py": Picture(
        "recovery.png",
        lambda _: "Recovery of 4 ranks, 25 M parameters",
        Bars(
            {"sirtaki": ("sirtaki", BLUE), "torchrun": ("torchrun", ORANGE)},
            lambda row: row["launcher"],
            lambda row: f"{row['launcher']}, {len(row['seconds'])} kills",
            lambda row: median(row["seconds"]),
            "seconds from kill -9 to the next step,\nbeyond one step (lines: least to worst)",
            interval=lambda row: [min(row["seconds"]), max(row["seconds"])],
            rows=recoveries,
        ),
    ),
    "compression.py": Picture(
        "compression.png",
        lambda measured: f"All-reduce (average) of float32 tensors in wire formats, {place_of(measured)}",
        Bars(
            {
                "float32": ("float32", PLAIN),
                "bfloat16": ("bfloat16", ORANGE),
                "int8": ("int8", BLUE),
                "int8, feedback": ("int8, feedback", SKY),
                "fp8": ("fp8", GREEN),
                "fp8, feedback": ("fp8, feedback", RED),
            },
            lambda row: row["format"],
            lambda row: readable(row["bytes"]),
            lambda row: row["speed"][0],
            "speed, times that of float32\n(thin lines: 95 % interval)",
            "{height:.1f}",
            interval=lambda row: row["speed"][1:],
            xlabel="size of the tensor (EQuARX, int8: 1.8 × bfloat16, arXiv 2506.17615)",
        ),
        legend_columns=3,
    ),
    "compression_step.py": Picture(
        "compression_step.png",
        lambda measured: f"Training step with compressed gradients, {place_of(measured)}",
        Bars(
            STEPS,
            lambda row: row["model"],
            lambda row: {"alone": "without\nexchange"}.get(row["way"], row["way"].replace("(", "\n(")),
            lambda row: row["gain"],
            "speed of a step,\ntimes that of Compression.none",
            "{height:.1f}",
            marks={
                "SDP4Bit, GPT on 128 GPUs: up to 4.08 × (arXiv 2410.15526)": (4.08, "--"),
                "1-bit Adam, BERT: up to 3.4 × (DeepSpeed's documentation)": (3.4, ":"),
            },
        ),
    ),
    "deadlines.py": Picture(
        "deadlines.png",
        lambda measured: f"A random rank of {measured['ranks']} is late in each step: deadline=0, quorum=0.5",
        Bars(
            {
                "synchronous": ("plain: all wait for the slowest", PLAIN),
                "accumulate": ('late="accumulate"', BLUE),
                "drop": ('late="drop"', ORANGE),
            },
            lambda row: row["way"],
            lambda row: f"{row['delay']:g}",
            lambda row: row["gain"],
            "steps per second,\ntimes those of plain training",
            inside="loss {loss:.4f}",
            xlabel="delay of the late rank, times the compute of a step (20 ms)",
            marks={"eager-SGD, networks: 1.27 to 1.29 × (arXiv 1908.04207)": (1.28, "--")},
        ),
    ),
    "staleness.py": Picture(
        "parameter_server.png",
        lambda measured: (
            f"Slow ranks and stale gradients, {measured['ranks']} ranks, "
            f"steps of {measured['milliseconds']} ms; inside: accuracy on digits"
        ),
        Bars(
            {
                ("optimizer", 0): ("plain: synchronous", PLAIN),
                ("optimizer", 1): ("staleness=1", SKY),
                ("optimizer", 2): ("staleness=2", GREEN),
                ("optimizer", 3): ("staleness=3", BLUE),
                ("table", 3): ("ParameterServer, staleness=3", ORANGE),
            },
            lambda row: (row["method"], row["staleness"]),
            lambda row: SLOW[row["slow"]],
            lambda row: row["share"],
            "steps per second of all ranks,\ntimes plain with none slow",
            inside="{accuracy:.1%}",
            marks={"synchronous bound, all wait for a slow rank: 0.50": (0.5, ":")},
        ),
        legend_columns=3,
    ),
    "sharding.py": Picture(
        "sharding.png",
        lambda measured: f"AdamW with divided state and gradients, {measured['ranks']} ranks on one host",
        Bars(
            SHARDS,
            lambda row: row["shard"],
            lambda row: short(row["model"]),
            lambda row: row["ratio"][0],
            "duration of a step, times plain\n(thin lines: 95 % interval)",
            interval=lambda row: row["ratio"][1:],
            marks={"ZeRO, stages 1 and 2: the volume of data parallelism (arXiv 1910.02054)": (1.0, "--")},
        ),
        Bars(
            SHARDS,
            lambda row: row["shard"],
            lambda row: short(row["model"]),
            lambda row: row["state"] + row["gradients"],
            "state and gradients of a rank, MB",
            "{height:,.0f}",
        ),
    ),
    "model_parallel.py": Picture(
        "model_parallel.png",
        lambda _: "Training step of a divided model, 2 ranks on one host, one thread each",
        Bars(
            {"gloo": ("torch's gloo backend, the reference", ORANGE), "sirtaki": ("sirtaki", BLUE)},
            lambda row: row["backend"],
            lambda row: row["division"],
            lambda row: row["median"],
            "duration of a step, ms\n(thin lines: 90 % of the steps)",
            "{height:.1f}",
            interval=lambda row: row["bounds"],
            rows=divisions,
        ),
    ),
    "overlap_forward.py": Picture(
        "overlap.png",
        lambda measured: f"Exchange during the next forward pass, {place_of(measured)}",
        Bars(
            {
                "synchronous": ("plain: exchange during the backward pass", PLAIN),
                "overlap_forward": ("overlap_forward=True", BLUE),
                "alone": ("without exchange", SKY),
            },
            lambda row: row["way"],
            lambda row: row["model"],
            lambda row: row["gain"],
            "speed of a step,\ntimes that of the plain one",
            marks={
                "P3, ResNet-50: 1.25 × (arXiv 1905.03960)": (1.25, "--"),
                "P3, VGG-19: 1.66 × (arXiv 1905.03960)": (1.66, ":"),
            },
        ),
    ),
    "local_steps.py": Picture(
        "local_sgd.png",
        lambda measured: f"Local steps, {place_of(measured)}; losses on one host",
        Bars(
            STEPS,
            lambda row: row["model"],
            local_name,
            lambda row: row["gain"],
            "speed of a step,\ntimes that of synchronous training",
            "{height:.1f}",
            rows=lambda measured: measured["steps"],
        ),
        Bars(
            {True: ("loss", PLAIN)},
            lambda _: True,
            local_name,
            lambda row: sum(row["losses"]) / len(row["losses"]),
            "loss of the language model\n(thin lines: by seed)",
            interval=lambda row: [min(row["losses"]), max(row["losses"])],
            rows=lambda measured: measured["losses"],
            bottom=1.0,
        ),
    ),
    "simulate.py": Picture(
        "scale.png",
        lambda measured: f"{measured['tensors']} tensors, {measured['network']}",
        *(simulated(name, axis) for axis, name in enumerate(("seconds", "frames", "bytes"))),
        legend_columns=3,
    ),
}

if __name__ == "__main__":
    main()
