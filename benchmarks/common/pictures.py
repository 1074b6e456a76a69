"""Parts of pictures: grouped bars, marks for published figures, and the line that describes the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window
from matplotlib import pyplot

SIZE, DOTS_PER_INCH = (8.0, 4.2), 144
# Colours of the palette by Okabe and Ito, which colour-blind readers tell apart.
PLAIN, BLUE, SKY, RED, ORANGE, GREEN = "#8c8c8c", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73"
DARK, LIGHT = "#333333", (SKY, ORANGE)
LINE_OF_TEXT = 1 / 12  # of the axes' height
SETTINGS = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


@dataclass(frozen=True)
class Bar:
    """The height of one bar, its 95 % interval, if one is known, and the texts above it and inside."""

    height: float
    interval: tuple[float, float] | None = None
    text: str = ""
    inside: str = ""


def prepare() -> None:
    """Sets the fonts and frames that all pictures share."""
    pyplot.rcParams.update(SETTINGS)


def new_axes(title: str, columns: int = 1) -> tuple[Any, Any]:
    """Returns a figure with a title, and its axes: a list of them if there are several columns."""
    figure, axes = pyplot.subplots(1, columns, figsize=SIZE)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure, axes


def draw_groups(
    axes: Any, groups: Sequence[str], series: dict[str, Sequence[Bar]], colors: dict[str, str]
) -> None:
    """Draws one bar of each series in each group, and leaves room for the texts above the bars.

    All series have one bar for each group.
    """
    width = 0.84 / len(series)
    top = 0.0
    for index, (name, bars) in enumerate(series.items()):
        for place, bar in enumerate(bars):
            where = place + (index - (len(series) - 1) / 2) * width
            label = name if place == 0 else None
            axes.bar(where, bar.height, width * 0.92, color=colors[name], label=label, zorder=2)
            end = bar.height
            if bar.interval:
                axes.plot([where, where], bar.interval, color=DARK, linewidth=1.2, zorder=3)
                end = max(end, bar.interval[1])
            _write_texts(axes, where, end, bar, "black" if colors[name] in LIGHT else "white")
            top = max(top, end)
    lines = max(bar.text.count("\n") + 1 for bars in series.values() for bar in bars)
    axes.set_ylim(0, top * (1 + lines * LINE_OF_TEXT))
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7, zorder=0)


def _write_texts(axes: Any, where: float, end: float, bar: Bar, color: str) -> None:
    """Writes above the end of a bar and its interval, on white, which hides marks behind; and inside."""
    axes.annotate(
        bar.text,
        (where, end),
        (0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
        zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
    )
    axes.annotate(
        bar.inside,
        (where, 0),
        (0, 5),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=9,
        rotation=90,
        color=color,
        zorder=6,
    )


def mark(axes: Any, height: float, label: str, style: str = "--") -> None:
    """Draws a horizontal line, whose meaning goes to the legend."""
    axes.axhline(height, color=DARK, linestyle=style, linewidth=1.3, label=label, zorder=4)


def show_legend(figure: Any, axes: Any, columns: int) -> None:
    """Places the legend below the axes, where it hides no bar."""
    handles, labels = axes.get_legend_handles_labels()
    below = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.04)}
    figure.legend(handles, labels, ncols=columns, frameon=False, fontsize=9, **below)


def finish(figure: Any, machine: dict[str, Any], path: Path, legend_lines: int = 0) -> Path:
    """Adds the machine's description and the date, and writes the picture.

    legend_lines: the height of a legend below the axes.
    """
    where = f"{machine['processor']}, {machine['cores']} cores, load {machine['load']:.1f}, {machine['date']}"
    figure.text(0.995, 0.005, where, ha="right", va="bottom", fontsize=8, color="#666666")
    figure.tight_layout(rect=(0, 0.035 + 0.055 * legend_lines, 1, 1))
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
    pyplot.close(figure)
    return path
