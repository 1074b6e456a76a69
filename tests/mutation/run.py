"""Tries all mutants: python tests/mutation/run.py [--only REGEX] [--jobs N] [--json FILE]

Each mutant is a small fault that a maintainer could make. The tests that its row in the table names must fail
with it, and pass without it. Prints a table, and the mutants that no test has detected. Needs the core with
its tests, as `make test` builds it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

sys.path.insert(0, str(Path(__file__).resolve().parent))

from laboratory import Ended, Laboratory, Result
from mutants import ROOT, Mutant, load
from native import Build


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=re.compile, default="", help="mutants whose folder and id this finds")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time")
    parser.add_argument("--json", type=Path, help="append each result as a line of JSON")
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build" / "core", help="where the core was built"
    )
    parser.add_argument("--show", action="store_true", help="show what the tests of each mutant wrote")
    return parser.parse_args()


def table(results: list[Result]) -> str:
    """Formats the results by folder, as a table in Markdown."""
    lines = ["| folder | mutants | killed | by hanging | survived |", "|---|---|---|---|---|"]
    for folder in [*sorted({result.mutant.folder for result in results}), "all"]:
        chosen = [result for result in results if folder in (result.mutant.folder, "all")]
        hung = sum(result.outcome == "timed out" for result in chosen)
        survived = sum(result.outcome == "survived" for result in chosen)
        killed = sum(result.is_killed for result in chosen)
        lines.append(f"| {folder} | {len(chosen)} | {killed} | {hung or ''} | {survived or ''} |")
    return "\n".join(lines)


class Trials:
    """Runs trials of mutants in several laboratories at the same time."""

    def __init__(self, options: argparse.Namespace, build: Build, folder: Path) -> None:
        self._options = options
        self._free: SimpleQueue[Laboratory] = SimpleQueue()
        for number in range(options.jobs):
            self._free.put(Laboratory(build, folder / str(number)))
        self._unmutated: dict[str, Ended] = {}  # by selection of tests
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)

    def run(self, mutants: list[Mutant]) -> list[Result]:
        with ThreadPoolExecutor(self._options.jobs) as pool:
            return list(pool.map(self._run, mutants))

    def _run(self, mutant: Mutant) -> Result:
        laboratory = self._free.get()
        try:
            normal = self._run_unmutated(mutant, laboratory)
            if normal.code == 0:
                result = laboratory.run(mutant, normal.seconds)
            else:
                result = Result(mutant, "invalid", 0.0, f"its tests fail without it, too:\n{normal.output}")
        finally:
            self._free.put(laboratory)
        self._tell(result)
        return result

    def _run_unmutated(self, mutant: Mutant, laboratory: Laboratory) -> Ended:
        """Runs the tests of a mutant without it, once for all mutants with the same tests."""
        with self._locks[mutant.tests]:
            if mutant.tests not in self._unmutated:
                self._unmutated[mutant.tests] = laboratory.run_unmutated(mutant)
        return self._unmutated[mutant.tests]

    def _tell(self, result: Result) -> None:
        print(
            f"{result.outcome:9} {result.seconds:5.1f} s  {result.mutant.folder}: {result.mutant.id}",
            flush=True,
        )
        if self._options.show or result.outcome == "invalid":
            print(result.output)
        if self._options.json:
            row = {"id": result.mutant.id, "folder": result.mutant.folder, "outcome": result.outcome}
            with self._options.json.open("a") as file:
                file.write(json.dumps(row | {"seconds": round(result.seconds, 1)}) + "\n")


def main() -> int:
    options = parse()
    build = Build(options.build)
    mutants = [one for one in load() if re.search(options.only, f"{one.folder}: {one.id}")]
    if any(mutant.is_native for mutant in mutants):
        build.refuse_stale()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        results = Trials(options, build, Path(folder)).run(mutants)
    print(f"\n{table(results)}\n")
    for result in results:
        if result.outcome == "survived":
            print(f"survived: {result.mutant.id}: {result.mutant.survives or 'nobody knows why'}")
    print(f"{time.monotonic() - begin:.0f} s")
    bad = [
        one for one in results if not one.is_killed and (one.outcome == "invalid" or not one.mutant.survives)
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
