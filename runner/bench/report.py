"""The result of `sirtaki bench`, as lines of text that are shown while it grows, and as JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.runner.bench.messages import BenchWorld, Plan

SCHEMA = 1
_BUSY = 0.5  # of the cores: other programs that run beside a measurement
_MAX_LINE = 500


class Load(NamedTuple):
    """The load average before the run, and the usable cores of this host."""

    average: float
    cores: int


class Report(ABC):
    """The result of an operation's benchmark."""

    def __init__(self, plan: Plan, world: BenchWorld, load: Load) -> None:
        self.plan, self.world, self.load = plan.without(world.left_out), world, load

    @property
    @abstractmethod
    def wrong(self) -> Mapping[str, int]:
        """Returns the number of wrong elements of each implementation that has any."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Returns whether there is a result."""

    @abstractmethod
    def take(self, message: object) -> Iterator[str]:
        """Adds a result of the ranks; returns the lines that show it."""

    @abstractmethod
    def foot_lines(self) -> Iterator[str]:
        """Returns the lines below the results."""

    @abstractmethod
    def values(self) -> Mapping[str, Any]:
        """Returns the results for JSON."""

    def columns(self) -> Iterator[str]:
        """Returns the lines with the heads of columns."""
        yield from ()

    def head_lines(self) -> Iterator[str]:
        """Returns the lines above the results."""
        places = ", ".join(f"{host}:{ranks}" for host, ranks in self.world.hosts.items())
        yield comment(f"sirtaki bench {self.plan.operation}, {self.world.size} ranks on {places}")
        yield comment("; ".join(f"{name}: {version}" for name, version in self.world.versions.items()))
        for name, reason in self.plan.left_out.items():
            yield comment(f"{name} is left out: {reason}")
        if self.load.average > _BUSY * self.load.cores:
            yield comment(
                f"Warning: the load average before the run was {self.load.average:.2f} on {self.load.cores} "
                "cores: other programs run, and the figures are worse than they could be"
            )
        yield "#"
        yield from self.columns()

    def verdict_lines(self) -> Iterator[str]:
        """Returns the lines about wrong elements."""
        total = sum(self.wrong.values())
        yield f"# Out of bounds values : {total} {'FAILED' if total else 'OK'}"
        for name, count in self.wrong.items():
            yield comment(f"{name} has delivered {count} wrong elements")

    @property
    def exit_code(self) -> int:
        return 1 if self.wrong else 0

    def as_json(self) -> str:
        """Returns all figures as a JSON object; `schema` changes when a field changes its meaning."""
        values = {
            "schema": SCHEMA,
            "version": VERSION,
            "exit_code": self.exit_code,
            "operation": self.plan.operation,
            "rounds": self.plan.rounds,
            "device": self.plan.device,
            "left_out": dict(self.plan.left_out),
            "ranks": self.world.size,
            "hosts": dict(self.world.hosts),
            "versions": dict(self.world.versions),
            "load": self.load.average,
            "cores": self.load.cores,
            "wrong": sum(self.wrong.values()),
            **self.values(),
        }
        return json.dumps(values, indent=2)


def comment(text: str) -> str:
    """Returns a line that parsers skip. The text may be another host's."""
    return f"# {printable(text, _MAX_LINE)}"


# ---- Lines of text in columns, as NVIDIA's nccl-tests print them ---------------------------------------


NONE = "N/A"  # as nccl-tests prints a column that does not apply


class Column(NamedTuple):
    """A column: its width, its head, and the unit below."""

    width: int
    head: str
    unit: str = ""


def peer_columns(peers: Sequence[str]) -> list[Column]:
    """Returns a column for each peer's time, as a multiple of sirtaki's."""
    return [Column(8, name, "(x)") for name in peers]


def heads(columns: Sequence[Column]) -> Iterator[str]:
    for cells in ([column.head for column in columns], [column.unit for column in columns]):
        yield "#" + line(cells, columns)[1:]


def line(cells: Sequence[str], columns: Sequence[Column]) -> str:
    return "".join(f" {cell:>{column.width - 1}}" for cell, column in zip(cells, columns, strict=True))


def duration(microseconds: float) -> str:
    """Formats a time with the digits that nccl-tests prints."""
    digits = 2 if microseconds < 100 else 1 if microseconds < 10_000 else 0
    return f"{microseconds:.{digits}f}"
