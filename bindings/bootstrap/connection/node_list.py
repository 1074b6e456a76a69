"""Slurm's notation for lists of nodes (https://slurm.schedmd.com/scontrol.html, "hostlist expressions")."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_ENTRIES = re.compile(r",(?![^\[]*\])")  # commas outside of brackets
_PARTS = re.compile(r"\[([\d,-]+)\]|([^\[\],\s]+)", re.ASCII)


def node_names(text: str) -> Iterator[str]:
    """Yields gpu07, gpu08, gpu12 and cpu1 for "gpu[07-08,12],cpu1". Raises ValueError if it is malformed."""
    for entry in _ENTRIES.split(text):
        parts = list(_PARTS.finditer(entry))
        if entry != "".join(part.group() for part in parts) or not entry or entry.startswith("["):
            raise ValueError(f"the list of nodes {text!r} is malformed")
        choices = [list(_numbers(part[1])) if part[1] else [part[2]] for part in parts]
        yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    """Yields the numbers of "07-09,12", padded to the width of each range's first number."""
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or not (last.isdecimal() and int(first) <= int(last) if dash else True):
            raise ValueError(f"{part!r} is not a range of numbers of nodes")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"
