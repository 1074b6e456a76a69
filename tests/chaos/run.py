"""Runs random trials of jobs that fail: python tests/chaos/run.py --trials 1000

Each trial is a job of 2 to 4 ranks with one random fault. Its seed determines everything, so that a failed
trial can be run again: python tests/chaos/run.py --seed 1234 --trials 1 --show
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from trial import WEIGHTS, Result, heed_interrupts, plan_of, run

KINDS = ("hang", "wrong sum", "wrong culprit", "exit code", "leftover")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no trial after this time")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others follow")
    parser.add_argument("--jobs", type=int, default=2, help="trials at the same time")
    parser.add_argument("--flavours", nargs="+", choices=WEIGHTS, help="only these programs")
    parser.add_argument("--json", type=Path, help="append each result as a line of JSON")
    parser.add_argument("--show", action="store_true", help="show what each job wrote")
    return parser.parse_args()


def table(results: list[Result]) -> str:
    """Formats the outcomes of trials, by fault, as a table in Markdown."""
    lines = [
        f"| fault | trials | {' | '.join(KINDS)} | median s to the end | longest |",
        "|---|" + "---|" * (len(KINDS) + 3),
    ]
    for fault in [*sorted({result.plan.fault for result in results}), "all"]:
        chosen = [result for result in results if fault in (result.plan.fault, "all")]
        counts = [
            sum(any(p.startswith(kind) for p in result.problems) for result in chosen) for kind in KINDS
        ]
        times = [r.seconds_to_end for r in chosen if r.seconds_to_end is not None and r.code != 0]
        spent = f"{statistics.median(times):.2f} | {max(times):.1f}" if times else "- | -"
        lines.append(f"| {fault} | {len(chosen)} | {' | '.join(map(str, counts))} | {spent} |")
    return "\n".join(lines)


def main() -> int:
    options = parse()
    heed_interrupts()
    weights = {name: WEIGHTS[name] for name in options.flavours} if options.flavours else None
    end = time.monotonic() + options.seconds
    results: list[Result] = []

    def try_one(seed: int) -> Result | None:
        return run(plan_of(seed, weights)) if time.monotonic() < end else None

    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(try_one, range(options.seed, options.seed + options.trials)):
            if result is None:
                continue
            results.append(result)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(result.to_json() + "\n")
            if result.problems or options.show:
                print(f"seed {result.plan.seed}: {result.problems or 'well'}: {result.plan}", flush=True)
                print(result.output if options.show else "", end="", flush=True)
    print(table(results))
    paths = Counter(f"{result.plan.path}, {result.plan.flavour}" for result in results)
    print("\n" + "; ".join(f"{name}: {count}" for name, count in sorted(paths.items())))
    failed = sum(bool(result.problems) for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
