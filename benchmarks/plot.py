"""Draws the results of the benchmarks: allreduce.png, train_step.png, recovery.png, and those of techniques.

    python benchmarks/targets.py --longer --json build/figures.json
    python benchmarks/plot.py build/figures.json [more files] [--folder docs/pictures]

A file may also come from allreduce.py, train_step.py or recovery.py, for one of these pictures, or from the
benchmark of a technique, for its picture: compression.py, compression_step.py, deadlines.py, sharding.py,
model_parallel.py, staleness.py for parameter_server.png, overlap_forward.py for overlap.png, and
local_steps.py for local_sgd.png, and simulate.py for scale.png. matplotlib is required.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from common.options import KIB, Option, parse
from common.pictures import SIZE, finish, prepare
from common.report import readable
from common.technique_pictures import PICTURES
from matplotlib import pyplot

Style = dict[str, Any]
# sirtaki is highlighted; the others are drawn in muted colours.
LINES: dict[str, tuple[str, Style]] = {
    "sirtaki torch": ("sirtaki", {"color": "#1f5fbf", "linewidth": 2.6, "zorder": 5}),
    "memory bound": ("memory-bound prototype", {"color": "#555555", "linestyle": ":"}),
    "mpi": ("Open MPI", {"color": "#c8761c"}),
    "gloo": ("gloo", {"color": "#7a9a3b"}),
}
BARS = {
    "ddp": ("DDP over gloo", "#7a9a3b"),
    "prototype": ("prototype", "#999999"),
    "sirtaki": ("sirtaki", "#1f5fbf"),
}
RECOVERIES = {
    "sirtaki": "#1f5fbf",
    "torchrun": "#c8761c",
    "torchft": "#7a9a3b",
    "torchft, short timeouts": "#b5cc85",
}
FOLDER = Option(
    "--folder",
    type=Path,
    default=Path(__file__).parents[1] / "docs" / "pictures",
    help="where to (docs/pictures)",
)
FILES = Option("files", type=Path, nargs="+", metavar="FILE", help="what a benchmark has written with --json")


def main() -> None:
    options = parse(__doc__, [FILES, FOLDER])
    prepare()
    for file in options.files:
        written = draw(json.loads(file.read_text()), options.folder)
        if not written:
            sys.exit(f"{file} holds no results that have a picture")
        print("wrote", *written)


def draw(measured: dict[str, Any], folder: Path) -> list[Path]:
    """Draws the pictures of the results in a file; returns their paths."""
    machine = measured["machine"]
    if picture := PICTURES.get(Path(measured["command"][0]).name):
        name, technique = picture
        return [technique(measured, folder / name)]
    allreduce = measured.get("allreduce, 2 ranks", measured)
    steps = measured.get("train_step", measured)
    written = []
    if any(row.get("collective") == "allreduce" for row in allreduce.get("rows", [])):
        written.append(draw_allreduce(allreduce, machine, folder / "allreduce.png"))
    if "models" in steps:
        written.append(draw_steps(steps["models"], machine, folder / "train_step.png"))
    if "commit" in measured:
        written.append(draw_recoveries(measured, machine, folder / "recovery.png"))
    return written


def draw_allreduce(measured: dict[str, Any], machine: dict[str, Any], path: Path) -> Path:
    """Draws bus bandwidth by size, one line for each implementation."""
    figure, axes = pyplot.subplots(figsize=SIZE)
    for who, (label, style) in LINES.items():
        rows = [row for row in measured["rows"] if row["who"] == who and row["bytes"] >= KIB]
        if rows:
            sizes, speeds = [row["bytes"] for row in rows], [row["busbw"] for row in rows]
            axes.plot(sizes, speeds, marker="o", markersize=3.5, label=label, **style)
    sizes = sorted({row["bytes"] for row in measured["rows"] if row["bytes"] >= KIB})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [readable(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.legend(frameon=False)
    axes.set_title(f"All-reduce, float32 sum in place, {measured['ranks']} ranks on one host", loc="left")
    return finish(figure, machine, path)


def draw_steps(models: list[dict[str, Any]], machine: dict[str, Any], path: Path) -> Path:
    """Draws the exchange's cost in a training step, as a share of the step without exchange."""
    figure, axes = pyplot.subplots(figsize=SIZE)
    height = 0.8 / len(BARS)
    for index, (name, (label, color)) in enumerate(BARS.items()):
        for place, model in enumerate(models):
            sync = sorted(model["times"]["sync"])[len(model["times"]["sync"]) // 2]
            middle, low, high = (100 * bound / sync for bound in model["costs"][name])
            where = place + (index - (len(BARS) - 1) / 2) * height
            axes.barh(where, middle, height * 0.9, color=color, label=label if place == 0 else None)
            axes.plot([low, high], [where, where], color="#333333", linewidth=1)
            axes.text(max(high, 0), where, f"  {middle:+.0f} %", va="center", fontsize=9)
    axes.set_yticks(range(len(models)), [name_of(model) for model in models])
    axes.invert_yaxis()
    axes.axvline(0, color="#333333", linewidth=0.8)
    axes.set_xlabel("added to a step without exchange, %; thin lines: 95 % interval")
    axes.legend(frameon=False, loc="lower right")
    axes.set_title("What exchanging gradients costs, 2 ranks, one thread each", loc="left")
    return finish(figure, machine, path)


def draw_recoveries(measured: dict[str, Any], machine: dict[str, Any], path: Path) -> Path:
    """Draws how many recoveries took how long, on a logarithmic scale of seconds."""
    figure, axes = pyplot.subplots(figsize=SIZE)
    edges = [10 ** (-1.5 + place / 12) for place in range(43)]  # from 0.03 to 100 s
    for name, color in RECOVERIES.items():
        if name in measured and measured[name]["kills"]:
            seconds = [max(kill["seconds"], edges[0]) for kill in measured[name]["kills"]]
            axes.hist(seconds, bins=edges, label=f"{name}, {len(seconds)} kills", color=color)
    axes.set_xscale("log")
    ticks = ["0.03", "0.1", "0.3", "1", "3", "10", "30", "100"]
    axes.set_xticks([float(tick) for tick in ticks], ticks)
    axes.set_xlabel("seconds from kill -9 of a rank to the next step of the others, beyond one step")
    axes.set_ylabel("kills")
    axes.legend(frameon=False)
    axes.set_title("Recovery of 4 ranks, 25 M parameters", loc="left")
    return finish(figure, machine, path)


def name_of(model: dict[str, Any]) -> str:
    title = model["model"].partition(", ")[0].replace("TransformerEncoder", "Transformer")
    return f"{title}\n{model['parameters'] / 1e6:.1f} M in {model['tensors']} tensors"


if __name__ == "__main__":
    main()
