"""Kinds of pictures: grouped bars with marks for published figures, and lines by size or number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window
from matplotlib import pyplot

from common.report import Row

SIZE, DOTS_PER_INCH = (8.0, 4.2), 144
# Colours of the palette by Okabe and Ito, which colour-blind readers tell apart.
PLAIN, BLUE, SKY, RED, ORANGE, GREEN = "#8c8c8c", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73"
DARK, LIGHT = "#333333", (SKY, ORANGE)
LINE_OF_TEXT = 1 / 12  # of the axes' height
SETTINGS = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}

Measured = dict[str, Any]  # the contents of a JSON file
Styles = Mapping[Any, tuple[str, str]]  # label and colour of a series, by its key
Axes = Callable[[Any, Measured], None]  # draws on axes of matplotlib


def rows_of(measured: Measured) -> list[Row]:
    rows: list[Row] = measured["rows"]
    return rows


@dataclass(frozen=True)
class Bars:
    """One bar of each series in each group.

    Attributes:
        series, series_of: the styles, and the series of a row; rows of other series are not drawn.
        group_of: the label of a row's group, in the order of the rows.
        height, interval: of a row's bar, and the ends of the thin line on it, if there is one.
        text, inside: the texts above a bar and in it, as forms of the row and its `height`.
        marks: heights and styles of horizontal lines, by their meaning.
        bottom: where the axis begins.
    """

    series: Styles
    series_of: Callable[[Row], Any]
    group_of: Callable[[Row], str]
    height: Callable[[Row], float]
    ylabel: str
    text: str = "{height:.2f}"
    inside: str = ""
    interval: Callable[[Row], Sequence[float]] | None = None
    rows: Callable[[Measured], list[Row]] = rows_of
    xlabel: str = ""
    marks: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    bottom: float = 0.0

    def __call__(self, axes: Any, measured: Measured) -> None:
        rows = [row for row in self.rows(measured) if self.series_of(row) in self.series]
        groups = list(dict.fromkeys(map(self.group_of, rows)))
        width = 0.84 / len(self.series)
        ends = [self.bottom]
        for index, (key, (label, color)) in enumerate(self.series.items()):
            for row in (row for row in rows if self.series_of(row) == key):
                where = groups.index(self.group_of(row)) + (index - (len(self.series) - 1) / 2) * width
                ends.append(self._draw_bar(axes, where, width, row, color, label))
                label = "_nolegend_"
        for label, (height, style) in self.marks.items():
            axes.axhline(height, color=DARK, linestyle=style, linewidth=1.3, label=label, zorder=4)
        room = 1 + (self.text.count("\n") + 1) * LINE_OF_TEXT
        axes.set_ylim(min(self.bottom, *ends), self.bottom + (max(ends) - self.bottom) * room)
        axes.set_xticks(range(len(groups)), groups)
        axes.tick_params(axis="x", length=0, labelsize=8, labelrotation=90 if len(groups) > 9 else 0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.7, zorder=0)
        axes.set(ylabel=self.ylabel, xlabel=self.xlabel)

    def _draw_bar(self, axes: Any, where: float, width: float, row: Row, color: str, label: str) -> float:
        """Draws a bar and its texts, on white, which hides marks behind. Returns where it ends."""
        height = end = self.height(row)
        axes.bar(where, height, width * 0.92, color=color, label=label, zorder=2)
        if self.interval:
            low, high = self.interval(row)
            axes.plot([where, where], [low, high], color=DARK, linewidth=1.2, zorder=3)
            end = max(end, high)
        common = {"textcoords": "offset points", "ha": "center", "va": "bottom", "zorder": 6}
        white = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
        above = self.text.format(**row, height=height)
        axes.annotate(above, (where, max(end, 0)), (0, 3), fontsize=8, bbox=white, **common)
        inside = "black" if color in LIGHT else "white"
        text = self.inside.format(**row)
        axes.annotate(text, (where, self.bottom), (0, 5), fontsize=9, rotation=90, color=inside, **common)
        return end


@dataclass(frozen=True)
class Line:
    """The points of one line: x and y; a point whose y is 0 is not drawn."""

    label: str
    color: str
    points: Callable[[Measured], list[tuple[float, float]]]
    style: str = "-"


@dataclass(frozen=True)
class Lines:
    """Lines over an x that doubles; `ticks` are the texts of the values of x."""

    lines: Sequence[Line]
    xlabel: str
    ylabel: str
    ticks: Callable[[float], str]
    is_logarithmic: bool = False

    def __call__(self, axes: Any, measured: Measured) -> None:
        found: set[float] = set()
        for line in self.lines:
            points = [(x, y) for x, y in line.points(measured) if y > 0]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.plot(xs, ys, line.style, marker="o", markersize=3, color=line.color, label=line.label)
            found.update(xs)
        axes.set_xscale("log", base=2)
        shown = sorted(found)[:: max(len(found) // 4, 1)]
        axes.set_xticks(shown, map(self.ticks, shown))
        axes.minorticks_off()
        if self.is_logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel)


class Picture:
    """A picture of a benchmark's results: its file, its title, and its axes side by side."""

    def __init__(
        self, file: str, title: Callable[[Measured], str], *axes: Axes, legend_columns: int = 2
    ) -> None:
        self.file, self.title, self.axes, self.legend_columns = file, title, axes, legend_columns

    def draw(self, measured: Measured, machine: Mapping[str, Any], folder: Path) -> Path:
        """Writes the picture, with the machine's description and the date."""
        pyplot.rcParams.update(SETTINGS)
        figure, columns = pyplot.subplots(1, len(self.axes), figsize=SIZE, squeeze=False)
        figure.suptitle(self.title(measured), x=0.01, ha="left", fontsize=11)
        for axes, draw in zip(columns[0], self.axes, strict=True):
            draw(axes, measured)
        handles, labels = columns[0][0].get_legend_handles_labels()
        below = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.04)}
        figure.legend(handles, labels, ncols=self.legend_columns, frameon=False, fontsize=9, **below)
        where = (
            f"{machine['processor']}, {machine['cores']} cores, load {machine['load']:.1f}, {machine['date']}"
        )
        figure.text(0.995, 0.005, where, ha="right", va="bottom", fontsize=8, color="#666666")
        legend_lines = -(-len(labels) // self.legend_columns)
        figure.tight_layout(rect=(0, 0.035 + 0.055 * legend_lines, 1, 1))
        path = folder / self.file
        figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
        pyplot.close(figure)
        return path
