"""The harness of all benchmarks: runs what each declares, its options, measurement, tables and targets."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.options import JSON, Option, parse
from common.report import Table, Target, describe_machine, save, targets_table

Results = dict[str, Any]  # the contents of the JSON file, by title


def _no_tables(_: Results) -> Iterable[Table | str]:
    return ()


def _no_targets(_: Results) -> list[Target]:
    return []


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        description: the help text.
        options: besides --json.
        tables: makes tables, and lines of text, of the results.
        judge: compares the results with the targets.
    """

    description: str | None
    options: Sequence[Option]
    measure: Callable[[Namespace], Results]
    tables: Callable[[Results], Iterable[Table | str]] = _no_tables
    judge: Callable[[Results], list[Target]] = _no_targets

    def main(self) -> None:
        """Runs the benchmark with the options of the command line."""
        options = self.parse()
        print(*describe_machine(), sep="\n")
        results = self.run(**vars(options))
        targets = self.judge(results)
        if targets:
            targets_table(targets).print()
        save(options.json, results, targets)

    def parse(self, arguments: Sequence[str] | None = None) -> Namespace:
        return parse(self.description, [*self.options, JSON], arguments)

    def run(self, **options: Any) -> Results:
        """Measures, and prints the results; options that are not given have their defaults."""
        results = self.measure(Namespace(**{**vars(self.parse([])), **options}))
        for part in self.shown(results):
            print(part) if isinstance(part, str) else part.print()
        return results

    def shown(self, results: Results) -> list[Table | str]:
        """Returns the versions of what was measured, and the tables."""
        versions = results.get("versions", {})
        return [*(f"{name}: {version}" for name, version in versions.items()), *self.tables(results)]
