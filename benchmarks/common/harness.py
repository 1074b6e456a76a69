"""The harness of all benchmarks: runs what each declares, its options, measurement, tables and targets."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.options import JSON, Option, parse
from common.report import Target, save, show_machine, show_targets, show_versions

Results = dict[str, Any]  # the contents of the JSON file, by title; rows may be dataclasses


def _nothing(_: Results) -> None:
    """Prints no table."""


def _no_targets(_: Results) -> list[Target]:
    return []


@dataclass(frozen=True)
class Benchmark:
    """One benchmark."""

    description: str | None  # the help text
    options: Sequence[Option]  # besides --json
    measure: Callable[[Namespace], Results]
    show: Callable[[Results], None] = _nothing  # prints the tables
    judge: Callable[[Results], list[Target]] = _no_targets  # compares the results with the targets

    def main(self) -> None:
        """Runs the benchmark with the options of the command line."""
        options = self.parse()
        show_machine()
        results = self.run(**vars(options))
        targets = self.judge(results)
        show_targets(targets)
        save(options.json, results, targets)

    def parse(self, arguments: Sequence[str] | None = None) -> Namespace:
        return parse(self.description, [*self.options, JSON], arguments)

    def run(self, **options: Any) -> Results:
        """Measures, and shows the results; options that are not given have their defaults."""
        results = self.measure(Namespace(**{**vars(self.parse([])), **options}))
        show_versions(results.get("versions", {}))
        self.show(results)
        return results
