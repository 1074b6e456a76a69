"""One picture for each benchmark of a technique, from its JSON file, beside the published figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.measure import median, ratio
from common.pictures import (
    BLUE,
    DARK,
    GREEN,
    ORANGE,
    PLAIN,
    RED,
    SKY,
    Bar,
    draw_groups,
    finish,
    mark,
    new_axes,
    show_legend,
)
from common.report import readable
from common.scale_picture import draw_scale

Measured = dict[str, Any]  # the contents of a JSON file
Row = dict[str, Any]
FORMATS = {
    "float32": PLAIN,
    "bfloat16": ORANGE,
    "int8": BLUE,
    "int8, feedback": SKY,
    "fp8": GREEN,
    "fp8, feedback": RED,
}
EQUARX = 1.8  # times as fast as bfloat16
MODELS = {
    "linear": ("6 × Linear(2048), 100 MB of gradients", BLUE),
    "transformer": ("transformer, 38 MB of gradients", ORANGE),
}
PUBLISHED_STEPS = {
    "SDP4Bit, GPT on 128 GPUs: up to 4.08 × (arXiv 2410.15526)": (4.08, "--"),
    "1-bit Adam, BERT: up to 3.4 × (DeepSpeed's documentation)": (3.4, ":"),
}
LATE = {
    "synchronous": ("plain: all wait for the slowest", PLAIN),
    "accumulate": ('late="accumulate"', BLUE),
    "drop": ('late="drop"', ORANGE),
}
EAGER_SGD = 1.28  # between the two
SLOW = {
    "none": "no rank is slow",
    "one": "the last rank is\ntwice as slow",
    "each": "another rank in each\nstep",
}
STALE = {
    ("optimizer", 0): ("plain: synchronous", PLAIN),
    ("optimizer", 1): ("staleness=1", SKY),
    ("optimizer", 2): ("staleness=2", GREEN),
    ("optimizer", 3): ("staleness=3", BLUE),
    ("table", 3): ("ParameterServer, staleness=3", ORANGE),
}
SHARDS = {
    "none": ("plain", PLAIN),
    "state": ('shard="state" (ZeRO-1)', BLUE),
    "gradients": ('shard="gradients" (ZeRO-2)', ORANGE),
}
BACKENDS = {"gloo": ORANGE, "sirtaki": BLUE}
OVERLAPS = {
    "synchronous": ("plain: exchange during the backward pass", PLAIN),
    "overlap_forward": ("overlap_forward=True", BLUE),
    "alone": ("without exchange", SKY),
}
OVERLAPPED_MODELS = {
    "vgg": "VGG's proportions,\n26 MB of gradients",
    "transformer": "transformer,\n38 MB of gradients",
    "vgg elsewhere": "VGG's parameters,\ncomputed elsewhere",
}
P3 = {"ResNet-50": (1.25, "--"), "VGG-19": (1.66, ":")}


def draw_formats(measured: Measured, path: Path) -> Path:
    """Draws the speed of an all-reduce in each wire format. The figure of EQuARX is relative to bfloat16."""
    rows: list[Row] = measured["rows"]
    sizes = sorted({row["bytes"] for row in rows})
    series = {
        name: [
            Bar(row["speed"][0], tuple(row["speed"][1:]), f"{row['speed'][0]:.1f}")
            for size in sizes
            for row in rows
            if (row["bytes"], row["format"]) == (size, name)
        ]
        for name in FORMATS
    }
    title = "All-reduce (average) of float32 tensors in wire formats"
    figure, axes = new_axes(f"{title}, {place_of(measured)}")
    draw_groups(axes, [readable(size) for size in sizes], series, FORMATS)
    for place, bar in enumerate(series["bfloat16"]):
        label = "EQuARX, int8: 1.8 × bfloat16 (arXiv 2506.17615)" if place == 0 else None
        axes.plot(
            [place - 0.45, place + 0.45], [EQUARX * bar.height] * 2, "--", color=DARK, label=label, zorder=4
        )
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.08 * EQUARX * max(bar.height for bar in series["bfloat16"])))
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel("speed, times that of float32\n(thin lines: 95 % interval)")
    show_legend(figure, axes, columns=3)
    return finish(figure, measured["machine"], path, legend_lines=3)


def draw_compressed_steps(measured: Measured, path: Path) -> Path:
    """Draws the speed of a training step with each compression, as a multiple of that without."""
    rows: list[Row] = measured["rows"]
    names = list(dict.fromkeys(row["compression"] for row in rows))
    order = [*(name for name in names if name != "alone"), "alone"]
    series, colors = {}, {}
    for model, (label, color) in MODELS.items():
        found = {row["compression"]: row for row in rows if row["model"] == model}
        series[label] = [Bar(found[name]["gain"], text=f"{found[name]['gain']:.1f}") for name in order]
        colors[label] = color
    title = f"Training step with compressed gradients, {place_of(measured)}"
    figure, axes = new_axes(title)
    words = {"none": "none\n(plain)", "alone": "without\nexchange"}
    draw_groups(axes, [words.get(name, name.replace("(", "\n(")) for name in order], series, colors)
    for label, (height, style) in PUBLISHED_STEPS.items():
        mark(axes, height, label, style)
    axes.set_ylabel("speed of a step,\ntimes that of Compression.none")
    show_legend(figure, axes, columns=2)
    return finish(figure, measured["machine"], path, legend_lines=2)


def draw_deadlines(measured: Measured, path: Path) -> Path:
    """Draws the steps per second with a deadline, as a multiple of those without, and the final losses."""
    rows: list[Row] = measured["rows"]
    delays = sorted({row["delay"] for row in rows})
    series, colors = {}, {}
    for way, (label, color) in LATE.items():
        found = {row["delay"]: row for row in rows if row["way"] == way}
        series[label] = [
            Bar(found[one]["gain"], text=f"{found[one]['gain']:.2f}", inside=f"loss {found[one]['loss']:.4f}")
            for one in delays
        ]
        colors[label] = color
    figure, axes = new_axes(
        f"A random rank of {measured['ranks']} is late in each step: deadline=0, quorum=0.5"
    )
    draw_groups(axes, [f"{delay:g}" for delay in delays], series, colors)
    mark(axes, EAGER_SGD, "eager-SGD, training of networks: 1.27 to 1.29 × (arXiv 1908.04207)")
    axes.set_xlabel("delay of the late rank, times the compute of a step (20 ms)")
    axes.set_ylabel("steps per second,\ntimes those of plain training")
    show_legend(figure, axes, columns=2)
    return finish(figure, measured["machine"], path, legend_lines=2)


def draw_staleness(measured: Measured, path: Path) -> Path:
    """Draws the speed of trainings with a slow rank, as a share of that of plain ones without."""
    rows = {(row["slow"], row["method"], row["staleness"]): row for row in measured["rows"]}
    series, colors = {}, {}
    for (method, staleness), (label, color) in STALE.items():
        found = [rows[slow, method, staleness] for slow in SLOW]
        series[label] = [
            Bar(row["share"], text=f"{row['share']:.2f}", inside=f"{100 * row['accuracy']:.1f} %")
            for row in found
        ]
        colors[label] = color
    ranks = measured["ranks"]
    title = f"Slow ranks and stale gradients, {ranks} ranks, steps of {measured['milliseconds']} ms"
    figure, axes = new_axes(f"{title}; inside: accuracy on digits")
    draw_groups(axes, list(SLOW.values()), series, colors)
    ideal = (ranks - 0.5) / ranks
    mark(axes, ideal, f"asynchronous ideal, nobody waits: {ideal:.2f}")
    mark(axes, 0.5, "synchronous bound, all wait for a slow rank: 0.50", ":")
    axes.set_ylabel("steps per second of all ranks,\ntimes plain with none slow")
    show_legend(figure, axes, columns=3)
    return finish(figure, measured["machine"], path, legend_lines=3)


def draw_sharding(measured: Measured, path: Path) -> Path:
    """Draws the duration of a step with divided state and gradients, and what a rank keeps of them."""
    rows: list[Row] = measured["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    times: dict[str, list[Bar]] = {}
    kept: dict[str, list[Bar]] = {}
    colors = dict(SHARDS.values())
    for shard, (label, _) in SHARDS.items():
        found = {row["model"]: row for row in rows if row["shard"] == shard}
        whole = {row["model"]: row["state"] + row["gradients"] for row in rows if row["shard"] == "none"}
        times[label] = [
            Bar(found[model]["ratio"][0], tuple(found[model]["ratio"][1:]), f"{found[model]['ratio'][0]:.2f}")
            for model in models
        ]
        kept[label] = []
        for model in models:
            megabytes = found[model]["state"] + found[model]["gradients"]
            kept[label].append(Bar(megabytes / whole[model], text=f"{megabytes:,.0f}\nMB"))
    ranks = measured["ranks"]
    figure, (left, right) = new_axes(f"AdamW with divided state and gradients, {ranks} ranks on one host", 2)
    groups = [model.partition(", ")[0].replace("TransformerEncoder ", "Transformer\n") for model in models]
    groups = [group.replace(" × Linear", " ×\nLinear") for group in groups]
    draw_groups(left, groups, times, colors)
    draw_groups(right, groups, kept, colors)
    mark(left, 1.0, "ZeRO, stages 1 and 2: the volume of data parallelism (arXiv 1910.02054)")
    mark(right, 1 / ranks, "")
    right.annotate(
        f"1/{ranks}", (1.01, 1 / ranks), xycoords=("axes fraction", "data"), va="center", fontsize=9
    )
    left.set_ylabel("duration of a step, times plain\n(thin lines: 95 % interval)")
    right.set_ylabel("state and gradients of a rank,\ntimes plain")
    show_legend(figure, left, columns=2)
    return finish(figure, measured["machine"], path, legend_lines=2)


def draw_divided_models(measured: Measured, path: Path) -> Path:
    """Draws the distribution of the steps of models that are divided over ranks, over each backend."""
    divisions = measured["divisions"]
    figure, columns = new_axes(
        "Training step of a divided model, 2 ranks on one host, one thread each", len(divisions)
    )
    for axes, one in zip(columns, divisions, strict=True):
        times = [one["times"][backend] for backend in BACKENDS]
        drawn = axes.boxplot(times, widths=0.55, whis=(5, 95), showfliers=False, patch_artist=True)
        for box, line, color in zip(drawn["boxes"], drawn["medians"], BACKENDS.values(), strict=True):
            box.set_facecolor(color)
            line.set_color(DARK)
        baseline = median(one["times"]["gloo"])
        mark(
            axes,
            baseline,
            "median of torch's gloo backend, the reference; boxes: half of the steps; lines: 90 %",
        )
        faster = ratio(one["times"]["gloo"], one["times"]["sirtaki"])
        axes.set_title(f"{one['division']}: {faster.median:.2f} × gloo's speed", fontsize=10)
        names = [f"{backend}\n{median(one['times'][backend]):.1f} ms" for backend in BACKENDS]
        axes.set_xticks([1, 2], names)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("duration of a step, ms")
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    show_legend(figure, columns[0], columns=1)
    return finish(figure, measured["machine"], path, legend_lines=1)


def draw_overlap(measured: Measured, path: Path) -> Path:
    """Draws the speed of a step that exchanges during the next forward pass, too."""
    rows = {(row["model"], row["way"]): row for row in measured["rows"]}
    series = {
        label: [
            Bar(rows[model, way]["gain"], text=f"{rows[model, way]['gain']:.2f}")
            for model in OVERLAPPED_MODELS
        ]
        for way, (label, _) in OVERLAPS.items()
    }
    figure, axes = new_axes(f"Exchange during the next forward pass, {place_of(measured)}")
    draw_groups(axes, list(OVERLAPPED_MODELS.values()), series, dict(OVERLAPS.values()))
    for network, (height, style) in P3.items():
        mark(axes, height, f"P3, {network}: {height:.2f} × (arXiv 1905.03960)", style)
    axes.set_ylabel("speed of a step,\ntimes that of the plain one")
    show_legend(figure, axes, columns=3)
    return finish(figure, measured["machine"], path, legend_lines=2)


def draw_local_steps(measured: Measured, path: Path) -> Path:
    """Draws the speed of steps that rarely exchange, and the losses that they lead to, if measured."""
    losses: list[Row] = measured["losses"]
    title = f"Local steps, {place_of(measured)}"
    figure, found = new_axes(f"{title}; losses on one host" if losses else title, 2 if losses else 1)
    columns = found if losses else [found]
    _draw_local_speeds(columns[0], measured["steps"])
    if losses:
        _draw_losses(columns[1], losses)
    for axes in columns:
        axes.tick_params(axis="x", labelrotation=90 if losses else 0, labelsize=8)
    show_legend(figure, columns[0], columns=2)
    return finish(figure, measured["machine"], path, legend_lines=1)


def _draw_local_speeds(axes: Any, steps: list[Row]) -> None:
    ways = list(dict.fromkeys((row["method"], row["every"]) for row in steps))
    series, colors = {}, {}
    for model, (label, color) in MODELS.items():
        gains = {(row["method"], row["every"]): row["gain"] for row in steps if row["model"] == model}
        series[label] = [Bar(gains[way], text=f"{gains[way]:.1f}") for way in ways]
        colors[label] = color
    draw_groups(axes, [_short_name(*way) for way in ways], series, colors)
    axes.set_ylabel("speed of a step,\ntimes that of synchronous training")


def _draw_losses(axes: Any, losses: list[Row]) -> None:
    """Draws the loss of each seed, and a band from the least to the largest one of synchronous training."""
    for place, row in enumerate(losses):
        axes.plot([place] * len(row["losses"]), row["losses"], "o", color=BLUE, markersize=4)
    axes.axhspan(min(losses[0]["losses"]), max(losses[0]["losses"]), color=PLAIN, alpha=0.3)
    axes.set_xticks(range(len(losses)), [_short_name(row["method"], row["every"]) for row in losses])
    axes.set_ylabel("loss of the language model, by seed\n(band: synchronous training)")
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)


def _short_name(method: str, every: int) -> str:
    return f"{method},\nevery={every}" if "Local" in method or "DiLoCo" in method else method


def place_of(measured: Measured) -> str:
    """Describes the hosts of a measurement, and the links between them."""
    rate = measured["rate"]
    links = "links without a limit" if rate == "none" else f"links of {rate.replace('gbit', ' Gbit/s')}"
    return f"{measured['hosts']} hosts, {links}"


# The picture of each benchmark: its file, and the function that draws it.
PICTURES: dict[str, tuple[str, Callable[[Measured, Path], Path]]] = {
    "compression.py": ("compression.png", draw_formats),
    "compression_step.py": ("compression_step.png", draw_compressed_steps),
    "deadlines.py": ("deadlines.png", draw_deadlines),
    "staleness.py": ("parameter_server.png", draw_staleness),
    "sharding.py": ("sharding.png", draw_sharding),
    "model_parallel.py": ("model_parallel.png", draw_divided_models),
    "overlap_forward.py": ("overlap.png", draw_overlap),
    "local_steps.py": ("local_sgd.png", draw_local_steps),
    "simulate.py": ("scale.png", draw_scale),
}
