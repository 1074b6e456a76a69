"""Draws bus bandwidth by size, as PNG or SVG, with matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from sirtaki.runner.bench.collective_report import CollectiveReport
from sirtaki.runner.errors import LaunchError

SUFFIXES = (".png", ".svg")
_SIZE, _DOTS_PER_INCH = (8.0, 4.2), 144
# Colours of the palette by Okabe and Ito, which colour-blind readers tell apart.
_OWN, _LIMIT, _PEERS = "#0072b2", "#333333", ("#d55e00", "#009e73")
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def check_plot(path: Path) -> None:
    """Raises LaunchError if no picture can be drawn, before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise LaunchError(f"--plot writes {' or '.join(SUFFIXES)}, not {path.name!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise LaunchError("--plot needs matplotlib: pip install 'sirtaki[plot]'")
    if not path.absolute().parent.is_dir():
        raise LaunchError(f"cannot write {path}: there is no folder {path.parent}")


def draw(report: CollectiveReport, path: Path) -> None:
    """Writes the picture. Raises LaunchError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE)
    axes = figure.subplots()
    rows = report.rows
    sizes = [row.size for row in rows]
    for name, color in zip(report.plan.peers, _PEERS, strict=False):
        axes.plot(sizes, [row.peers[name].busbw for row in rows], marker=".", color=color, label=name)
    bounded = [(row.size, row.busbw / row.limit) for row in rows if row.limit]
    if bounded:
        axes.plot(*zip(*bounded, strict=True), linestyle=":", color=_LIMIT, label="limit")
    axes.plot(
        sizes,
        [row.busbw for row in rows],
        marker="o",
        markersize=4,
        linewidth=2.4,
        color=_OWN,
        label="sirtaki",
    )
    _label(axes, report, sizes)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}") from None


def _label(axes: Any, report: CollectiveReport, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_readable(size) for size in sizes], rotation=45)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    plan = report.plan
    axes.set_title(f"{plan.operation}, {plan.dtype}, {report.world.size} ranks", loc="left")


def _readable(size: int) -> str:
    divisor, unit = next((divisor, unit) for divisor, unit in _UNITS if size >= divisor)
    return f"{size / divisor:.3g} {unit}"
