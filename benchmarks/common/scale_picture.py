"""The picture of docs/design/scale.md: time, frames and bytes of simulated jobs, by their number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.pictures import BLUE, GREEN, ORANGE, RED, SKY, finish, new_axes, show_legend

Measured = dict[str, Any]
Value = Callable[[dict[str, Any]], float]
TICKS = (8, 64, 512, 4096)
LARGE = 1 << 20  # bytes, from which an all-reduce is the one of the picture


@dataclass(frozen=True)
class Line:
    """A part of the simulation, by its section, and its values, of which 0 is not drawn."""

    section: str
    color: str
    label: str
    seconds: Value
    frames: Value
    bytes: Value
    style: str = "-"
    belongs: Callable[[dict[str, Any]], bool] = lambda row: True


LINES = (
    Line(
        "negotiation",
        BLUE,
        "negotiation (rank 0 receives)",
        lambda row: row["steady"]["latency"] / 1e6,
        lambda row: row["steady"]["frames_in"],
        lambda row: row["steady"]["bytes_in"],
    ),
    Line(
        "negotiation",
        SKY,
        "its first step",
        lambda row: row["first"]["latency"] / 1e6,
        lambda row: row["first"]["frames_in"],
        lambda row: row["first"]["bytes_in"],
    ),
    Line(
        "allreduce",
        GREEN,
        "64 MiB all-reduce (a host sends)",
        lambda row: row["microseconds"] / 1e6,
        lambda row: row["frames"],
        lambda row: row["bytes"],
        belongs=lambda row: row["size"] >= LARGE,
    ),
    Line(
        "start",
        ORANGE,
        "init() (the rendezvous sends)",
        lambda row: row["seconds"],
        lambda row: row["sent_frames"],
        lambda row: row["sent_by_server"],
    ),
    Line(
        "loss",
        RED,
        "lost process (all send)",
        lambda row: row["last"] / 1e6,
        lambda row: row["frames"],
        lambda row: row["bytes"],
        belongs=lambda row: not row["host"],
    ),
    Line(
        "loss",
        RED,
        "lost host (all send)",
        lambda row: row["last"] / 1e6,
        lambda row: row["frames"],
        lambda row: row["bytes"],
        style="--",
        belongs=lambda row: bool(row["host"]),
    ),
)


def draw_scale(measured: Measured, path: Path) -> Path:
    """Draws the sections that were simulated, each in the same colour in all three axes."""
    figure, columns = new_axes("Simulated jobs", 3)
    figure.suptitle(f"{measured['tensors']} tensors, {measured['network']}", x=0.01, ha="left", fontsize=9)
    for axes, name in zip(columns, ("seconds", "frames", "bytes"), strict=True):
        for line in LINES:
            _draw_line(axes, line, getattr(line, name), measured.get(line.section, []))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(TICKS, [f"{ranks:,}" for ranks in TICKS])
        axes.set_xlabel("ranks")
        axes.set_ylabel(name)
        axes.grid(color="#dddddd", linewidth=0.7)
    show_legend(figure, columns[0], columns=3)
    return finish(figure, measured["machine"], path, legend_lines=2)


def _draw_line(axes: Any, line: Line, value: Value, rows: list[dict[str, Any]]) -> None:
    drawn = [(row["ranks"], value(row)) for row in rows if line.belongs(row) and value(row) > 0]
    ranks, values = [one for one, _ in drawn], [one for _, one in drawn]
    axes.plot(
        ranks, values, line.style, marker="o", markersize=3, linewidth=1.5, color=line.color, label=line.label
    )
