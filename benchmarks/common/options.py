"""The options that benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20


def parser(description: str | None, rounds: int, of_what: str) -> argparse.ArgumentParser:
    """Returns a parser with --rounds, whose default is `rounds` of `of_what`, and --json."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help=f"how many {of_what} ({rounds})")
    add_json(made)
    return made


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write everything to this file, too")


def add_sizes(parser: argparse.ArgumentParser, default: list[int]) -> None:
    """Adds -np and --sizes."""
    parser.add_argument("-np", dest="ranks", type=int, default=2, help="how many ranks (2)")
    text = "in bytes; 64K and 4M work"
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=default, help=text)


def parse_size(text: str) -> int:
    """Parses a number of bytes, with K or M for binary multiples; accepts whole float32 elements only."""
    factor = {"K": KIB, "M": MIB}.get(text[-1].upper(), 1)
    return max(int(text.rstrip("kKmM")) * factor // 4, 1) * 4
