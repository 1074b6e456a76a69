"""Prints the results of the benchmarks as the tables of benchmarks/results/one_host.md.

python benchmarks/targets.py --longer --json build/figures.json
python benchmarks/tables.py build/figures.json
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.measure import median
from common.options import Option, parse
from common.report import readable

PEERS = {"gloo": "gloo", "mpi": "Open MPI", "memory bound": "memory bound"}


def main() -> None:
    options = parse(__doc__, [Option("file", type=Path, help="the JSON file of targets.py")])
    measured = json.loads(options.file.read_text())
    for title, part in measured.items():
        if title.startswith("allreduce"):
            print_table(f"{title}, µs", allreduce(part["rows"]))
        elif title.startswith("collectives"):
            print_table(f"{title}, µs", collectives(part["rows"]))
        elif title == "train_step":
            print_table("step − sync, ms", steps(part["models"]))
    print_table("targets", targets(measured["targets"]))


def print_table(title: str, rows: Iterable[Sequence[str]]) -> None:
    head, *body = rows
    print(f"\n{title}:\n")
    for row in (head, ["---"] * len(head), *body):
        print(f"| {' | '.join(row)} |")


def allreduce(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Returns one line per size: times, and ratios as medians of adjacent blocks."""
    ratios = [f"{name} / sirtaki" for name in PEERS.values()]
    table = [["bytes", "sirtaki (torch)", *PEERS.values(), *ratios]]
    for (_, size), found in by_who(rows).items():
        times = [time_of(found, who) for who in ("sirtaki torch", *PEERS)]
        table.append([readable(size), *times, *(ratio_of(found, who) for who in PEERS)])
    return table


def collectives(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Returns one line for each operation and size."""
    peers = ["gloo", "mpi"]
    names = [PEERS[who] for who in peers]
    table = [["operation", "bytes", "sirtaki (torch)", *names, *(f"{name} / sirtaki" for name in names)]]
    for (collective, size), found in by_who(rows).items():
        times = [time_of(found, who) for who in ("sirtaki torch", *peers)]
        ratios = [ratio_of(found, who) for who in peers]
        table.append([collective, readable(size) if size else "", *times, *ratios])
    return table


def steps(models: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the cost that each exchange adds to a step, with its interval."""
    exchanges = ["ddp", "sirtaki", "prototype"]
    table = [["model", "sync", *exchanges]]
    for model in models:
        cells = ["{:+.1f} ({:.1f} to {:.1f})".format(*model["costs"][name]) for name in exchanges]
        table.append([model["model"], f"{median(model['times']['sync']):.1f}", *cells])
    return table


def targets(found: list[dict[str, Any]]) -> list[list[str]]:
    cells = [
        [one["what"], one["target"], one["measured"], "met" if one["met"] else "missed"] for one in found
    ]
    return [["what", "target", "measured", ""], *cells]


def by_who(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """Groups the rows by operation and size, then by implementation."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["collective"], row["bytes"]), {})[row["who"]] = row
    return found


def time_of(rows: dict[str, dict[str, Any]], who: str) -> str:
    if who not in rows:
        return ""
    time = rows[who]["median"]
    return f"{time:,.0f}" if time >= 100 else f"{time:.1f}"


def ratio_of(rows: dict[str, dict[str, Any]], who: str) -> str:
    """Returns a peer's time as a multiple of sirtaki's."""
    slower = rows.get(who, {}).get("slower")
    if not slower:
        return ""
    return f"{slower[0]:.0f}" if slower[0] >= 10 else f"{slower[0]:.2g}"


if __name__ == "__main__":
    main()
