"""The command-line options of benchmarks, declared as data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20


class Option:
    """An option's names, and further arguments of ArgumentParser.add_argument."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings


def parse(
    description: str | None, options: Sequence[Option], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parses the arguments, or the command line without them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    for option in options:
        parser.add_argument(*option.names, **option.settings)
    return parser.parse_args(arguments)


def parse_size(text: str) -> int:
    """Parses a number of bytes, with K or M for binary multiples; accepts whole float32 elements only."""
    factor = {"K": KIB, "M": MIB}.get(text[-1].upper(), 1)
    return max(int(text.rstrip("kKmM")) * factor // 4, 1) * 4


JSON = Option("--json", type=Path, help="write everything to this file, too")
RANKS = Option("-np", dest="ranks", type=int, default=2, help="how many ranks (2)")


def rounds(default: int, of_what: str) -> Option:
    return Option("--rounds", type=int, default=default, help=f"how many {of_what} ({default})")


def sizes(default: Sequence[int]) -> Option:
    text = "in bytes; 64K and 4M work"
    return Option("--sizes", type=parse_size, nargs="+", default=default, help=text)


def number(name: str, default: int, text: str, **settings: Any) -> Option:
    return Option(name, type=int, default=default, help=f"{text} ({default})", **settings)


def choice(name: str, choices: Sequence[str], text: str, default: Sequence[str] | None = None) -> Option:
    """Returns an option that selects some of the choices; all of them by default."""
    return Option(name, nargs="+", choices=choices, default=default or choices, help=text)
