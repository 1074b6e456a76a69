"""Measures sirtaki and every peer that is installed here, and writes a page about it.

    python benchmarks/compare.py [--only allreduce steps] [--sizes 1K 1M] [--rounds 5] [--folder FOLDER]

The parts are other benchmarks, whose peers are gloo, DeepSpeed, Open MPI, the memory-bound prototype, DDP and
FSDP, JAX and TensorFlow, and NCCL. What is not installed here, or needs a GPU, is left out, and the page says
so. The page is a Markdown file with tables and pictures, the targets that are met, and the processor, its
number of cores and its load.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectives import DTYPES
from common.harness import Benchmark, Results
from common.options import KIB, MIB, Option, choice, number, parse_size
from common.report import Table, Target, as_json, describe_machine, machine, targets_table

PAIR_SIZES = [4, KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
CORES = len(os.sched_getaffinity(0))
CROWD = 4
CROWD_SIZES = [64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]


@dataclass(frozen=True)
class Part:
    """A benchmark with its options, and the modules that it needs."""

    title: str
    script: str
    rounds: int
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ("torch",)
    is_drawn: bool = True  # if the benchmark has a picture

    @property
    def benchmark(self) -> Benchmark:
        found: Benchmark = importlib.import_module(self.script).BENCHMARK
        return found

    def missing(self) -> str:
        """Returns the reason why the part is left out; "" if it can be measured."""
        for module in self.needs:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        if self.script in ("nccl", "scaling"):
            import torch

            return "" if torch.cuda.is_available() else "there is no GPU"
        return ""

    def run(self, options: Namespace) -> Results:
        settings = {**self.options, "rounds": options.rounds or self.rounds}
        if options.sizes and any("--sizes" in one.names for one in self.benchmark.options):
            settings["sizes"] = options.sizes
        return self.benchmark.run(**settings)


ALL_REDUCE = {"only": ["allreduce"]}
PARTS = {
    "allreduce": Part("All-reduce, 2 ranks", "collectives", 7, {**ALL_REDUCE, "sizes": PAIR_SIZES}),
    "crowd": Part(
        f"All-reduce, {CROWD} ranks", "collectives", 7, {**ALL_REDUCE, "sizes": CROWD_SIZES, "ranks": CROWD}
    ),
    "dtypes": Part(
        "All-reduce by dtype and by threads of a rank, 2 ranks",
        "collectives",
        7,
        {**ALL_REDUCE, "sizes": CROWD_SIZES, "dtypes": DTYPES, "threads": sorted({1, CORES})},
        is_drawn=False,
    ),
    "collectives": Part("The other collectives, 2 ranks", "collectives", 5, is_drawn=False),
    "steps": Part("Training steps beside DDP", "train_step", 20),
    "torch": Part("DDP and FSDP over sirtaki and gloo", "torch_backend", 20),
    "jax": Part("JAX beside its own collectives", "jax_beside_gloo", 5, needs=("jax",)),
    "tensorflow": Part(
        "TensorFlow beside its own strategy", "tensorflow_allreduce", 5, needs=("tensorflow",)
    ),
    "gpu": Part("Operations on GPUs beside NCCL", "nccl", 11),
    "scaling": Part("Training of published models on GPUs beside DDP", "scaling", 5, is_drawn=False),
    "start": Part("Start", "startup", 3),
}


def measure(options: Namespace) -> Results:
    """Runs and prints one part after the other; writes the page after each."""
    before = describe_machine()
    results: Results = {}
    left_out: dict[str, str] = {}
    options.folder.mkdir(parents=True, exist_ok=True)
    page = options.folder / "comparison.md"
    for name in options.only:
        try:
            if reason := PARTS[name].missing():
                left_out[name] = reason
            else:
                results[name] = PARTS[name].run(options)
        except SystemExit as error:
            left_out[name] = f"it failed: {error}"
        page.write_text(make_page(results, left_out, before, options.folder))
    print("wrote", page)
    return results


def make_page(results: Results, left_out: dict[str, str], before: list[str], folder: Path) -> str:
    paragraphs = [
        "# sirtaki beside its peers",
        f"{machine()['date']}. Before the measurement: {before[0]}",
        *before[1:],
    ]
    for name, found in results.items():
        paragraphs.append(f"## {PARTS[name].title}")
        shown = PARTS[name].benchmark.shown(found)
        paragraphs += [part.markdown() if isinstance(part, Table) else part for part in shown]
        if picture := draw(name, found, folder):
            paragraphs.append(f"![{PARTS[name].title}]({picture})")
    if targets := judge(results):
        paragraphs += ["## Targets", targets_table(targets).markdown()]
    if left_out:
        lines = [f"* {PARTS[name].title}: {reason}" for name, reason in left_out.items()]
        paragraphs += ["## Left out", "\n".join(lines)]
    return "\n\n".join(paragraphs) + "\n"


def draw(name: str, found: Results, folder: Path) -> str:
    """Draws a part's picture into a folder; returns the name of the file, "" without a picture."""
    if importlib.util.find_spec("matplotlib") is None:
        return ""
    from plot import PICTURES

    picture = PICTURES.get(f"{PARTS[name].script}.py")
    if picture is None or not PARTS[name].is_drawn:
        return ""
    own = folder / name
    own.mkdir(exist_ok=True)
    return str(picture.draw(json.loads(as_json(found)), machine(), own).relative_to(folder))


def judge(results: Results) -> list[Target]:
    return [target for name, found in results.items() for target in PARTS[name].benchmark.judge(found)]


OPTIONS = [
    choice("--only", list(PARTS), "these parts (all)"),
    Option("--sizes", type=parse_size, nargs="+", help="of collectives (each part has its own)"),
    number("--rounds", 0, "blocks of each; 0: each part has its own"),
    Option("--folder", type=Path, default=Path("build/compare"), help="of the page (build/compare)"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, judge=judge)

if __name__ == "__main__":
    BENCHMARK.main()
