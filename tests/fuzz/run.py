"""Runs each fuzz target for its share of the time, beginning with its seeds and with what was found before.

The first finding ends it, with the words of libFuzzer or of the sanitizer, and says how to see it again.
What was worth keeping of the inputs stays in BUILD/inputs/<target>, so that the next run goes on from there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

FOUND_BEFORE = Path(__file__).parent / "corpus"
SLOWEST_INPUT = 10  # seconds: far beyond what any input should take
MOST_MEMORY = 1024  # MiB, sanitizers included
LARGEST_ALLOCATION = 128  # MiB: a frame of the greatest length is 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="where cmake --preset asan has built, with clang")
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--target", action="append", help="only this one; may be given again")
    options = parser.parse_args()
    build = options.build.absolute()
    inputs = build / "inputs"
    subprocess.run([build / "fuzz" / "fuzz_seeds", inputs], check=True)
    targets = options.target or sorted(folder.name for folder in inputs.iterdir())
    for target in targets:
        share = max(1, round(options.seconds / len(targets)))
        if not fuzz(build, target, share):
            return 1
    return 0


def fuzz(build: Path, target: str, seconds: int) -> bool:
    """Runs one target for `seconds`; returns whether nothing was found."""
    program = build / "fuzz" / f"fuzz_{target}"
    found = build / "findings"
    found.mkdir(exist_ok=True)
    folders = [build / "inputs" / target, FOUND_BEFORE / target]
    options = {
        "max_total_time": seconds,
        "timeout": SLOWEST_INPUT,
        "rss_limit_mb": MOST_MEMORY,
        "malloc_limit_mb": LARGEST_ALLOCATION,
        "artifact_prefix": f"{found}/{target}-",
        "verbosity": 0,
        "print_funcs": 0,
        "print_final_stats": 1,
    }
    command = [program, *(f"-{name}={value}" for name, value in options.items())]
    ended = subprocess.run(
        [*command, *(folder for folder in folders if folder.is_dir())],
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    if ended.returncode == 0:
        print(f"{target}: {executions(ended.stderr)} inputs in {seconds} s, and nothing found", flush=True)
        return True
    sys.stderr.write(ended.stderr)
    newest = max(found.glob(f"{target}-*"), key=lambda file: file.stat().st_mtime, default=None)
    print(f"\n{target}: something was found. To see it again:\n\n    {program} {newest}", file=sys.stderr)
    print(f"\nOnce it is put right, keep it: cp {newest} {FOUND_BEFORE / target}/", file=sys.stderr)
    return False


def executions(words: str) -> str:
    """Returns the number of inputs, as libFuzzer prints it at its end."""
    counts = [
        line.split()[-1] for line in words.splitlines() if line.startswith("stat::number_of_executed_units")
    ]
    return f"{int(counts[-1]):,}" if counts else "no"


if __name__ == "__main__":
    sys.exit(main())
