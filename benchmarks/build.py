"""Measures how long the core takes to build: as pip builds it, and the native tests beyond it.

Usage: python benchmarks/build.py [--units 5] [--json FILE]

Needs cmake and ninja. Seconds of processor time depend less on other work of the machine than wall time does.
"""

from __future__ import annotations

import resource
import subprocess
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from common.harness import Benchmark, Results
from common.options import number
from common.report import Target, at_most, show_rows

CORE = Path(__file__).resolve().parents[1] / "core"
INSTALLED, TESTS = "as pip builds it", "the native tests beyond it"


@dataclass(frozen=True)
class Build:
    """The seconds of a build."""

    what: str
    wall: float
    processor: float


@dataclass(frozen=True)
class Unit:
    """The seconds of wall time that an object file or a library takes."""

    name: str
    seconds: float


def measure(options: Namespace) -> Results:
    with tempfile.TemporaryDirectory(prefix="build") as folder:
        # The same folder, as in `make test`: the tests use the object files of the installation.
        builds = [
            measure_build(what, Path(folder), tests) for what, tests in ((INSTALLED, "OFF"), (TESTS, "ON"))
        ]
        slowest = sorted(read_units(Path(folder)), key=lambda unit: -unit.seconds)[: options.units]
    return {"builds": builds, "slowest": slowest}


def measure_build(what: str, folder: Path, tests: str) -> Build:
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DSIRTAKI_TESTS={tests}"]
    run("-S", str(CORE), "-B", str(folder), "-G", "Ninja", *options)
    before, begin = processor_seconds(), time.monotonic()
    run("--build", str(folder))
    return Build(what, time.monotonic() - begin, processor_seconds() - before)


def run(*arguments: str) -> None:
    subprocess.run(["cmake", *arguments], check=True, stdout=subprocess.DEVNULL)


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_units(folder: Path) -> list[Unit]:
    """Reads the log of ninja: start and end in milliseconds, a time stamp, the file, a hash."""
    units = {}
    for line in (folder / ".ninja_log").read_text().splitlines()[1:]:
        start, end, _, name, _ = line.split("\t")
        units[name] = Unit(name, (int(end) - int(start)) / 1000)
    return list(units.values())


def show(results: Results) -> None:
    builds = [
        ("build", lambda build: build.what),
        ("wall", lambda build: f"{build.wall:.0f} s"),
        ("processor", lambda build: f"{build.processor:.0f} s"),
    ]
    units = [("unit", lambda unit: unit.name), ("wall", lambda unit: f"{unit.seconds:.1f} s")]
    show_rows("Builds", builds, results["builds"])
    show_rows("Slowest units", units, results["slowest"])


def judge(results: Results) -> list[Target]:
    installed, tests = results["builds"]
    return [
        at_most(f"{INSTALLED}, processor time", 150, installed.processor, "s"),
        at_most(f"{TESTS}, processor time", 140, tests.processor, "s"),
    ]


BENCHMARK = Benchmark(
    __doc__, [number("--units", 5, "how many of the slowest units to show")], measure, show, judge
)

if __name__ == "__main__":
    BENCHMARK.main()
