"""The figures of a collective by size: the columns of NVIDIA's nccl-tests, and more to their right."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.runner.bench.messages import COPY, OWN, BenchWorld, Measurement, Plan
from sirtaki.runner.bench.operations import OPERATIONS, BenchOperation
from sirtaki.runner.bench.peers import CPU, PEERS
from sirtaki.runner.bench.samples import median_ratio

SCHEMA = 1
_BUSY = 0.5  # of the cores: other programs that run beside a measurement
_MAX_LINE = 500


class Load(NamedTuple):
    """The load average before the run, and the usable cores of this host."""

    average: float
    cores: int


class Report(ABC):
    """The result of an operation's benchmark.

    Attributes:
        COLUMNS: the columns of its table, before those of the peers; () for other forms.
        rows: the results so far.
    """

    COLUMNS: Sequence[Column] = ()

    def __init__(self, plan: Plan, world: BenchWorld, load: Load) -> None:
        self.plan, self.world, self.load = plan.without(world.left_out), world, load
        self.rows: list[Any] = []
        self._columns = [*self.COLUMNS, *peer_columns(self.plan.peers)]

    @property
    def wrong(self) -> Mapping[str, int]:
        """Returns the number of wrong elements of each implementation that has any."""
        total = sum(row.wrong for row in self.rows)
        return {OWN: total} if total else {}

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
        if self.COLUMNS:
            yield from heads(self._columns)

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


# ---- The report of a collective ------------------------------------------------------------------------

COLUMNS = (
    Column(12, "size", "(B)"),
    Column(14, "count", "(elements)"),
    Column(10, "type"),
    Column(8, "redop"),
    Column(8, "root"),
    Column(9, "time", "(us)"),
    Column(8, "algbw", "(GB/s)"),
    Column(8, "busbw", "(GB/s)"),
    Column(8, "#wrong"),
    Column(10, "p99", "(us)"),
    Column(8, "limit", "(%)"),
)


@dataclass(frozen=True)
class PeerFigures:
    """A peer's figures at a given size; `ratio` is its time as a multiple of sirtaki's."""

    time_us: float
    p99_us: float
    busbw: float
    ratio: float
    wrong: int


@dataclass(frozen=True)
class SizeRow:
    """The figures at a given size; bandwidths in 10^9 bytes per second.

    `limit` is the limit's time as a share of the operation's; None for small sizes, and without a limit.
    `backend` is the part of sirtaki's core that has moved the bytes, and `algorithm` its choice; "" where it
    has only one.
    """

    size: int
    count: int
    time_us: float
    algbw: float
    busbw: float
    wrong: int
    p99_us: float
    limit_us: float | None
    limit: float | None
    peers: Mapping[str, PeerFigures]
    backend: str = ""
    algorithm: str = ""

    @property
    def way(self) -> str:
        """Returns "links (ring)", or the backend alone."""
        return f"{self.backend} ({self.algorithm})" if self.algorithm else self.backend


class CollectiveReport(Report):
    """The result of a collective."""

    COLUMNS = COLUMNS
    rows: list[SizeRow]

    def __init__(self, plan: Plan, world: BenchWorld, load: Load) -> None:
        super().__init__(plan, world, load)
        self._operation = OPERATIONS[plan.operation]
        self._limit = Limit(self._operation, world, plan.device)

    @property
    def wrong(self) -> Mapping[str, int]:
        of_peers = {name: sum(row.peers[name].wrong for row in self.rows) for name in self.plan.peers}
        return {**super().wrong, **{name: total for name, total in of_peers.items() if total}}

    def take(self, message: object) -> Iterator[str]:
        assert isinstance(message, Measurement)
        self.rows.append(self._make_row(message))
        yield self._format(self.rows[-1])

    def foot_lines(self) -> Iterator[str]:
        yield from self.verdict_lines()
        yield f"# Avg bus bandwidth    : {self._average:g}"
        yield "#"
        yield comment("time: median of all calls; p99: of all calls; both are those of the slowest rank")
        if text := _backends_text(self.rows):
            yield comment(f"sirtaki's bytes went through: {text}")
        if self._limit.text:
            yield comment(f"limit: {self._limit.text}")
        for name in self.plan.peers:
            title = PEERS[name].title
            yield comment(f"{name}: time of {title}, as a multiple of sirtaki's (median of adjacent blocks)")

    def values(self) -> Mapping[str, Any]:
        return {
            "dtype": self.plan.dtype,
            "redop": self._operation.redop,
            "root": self._operation.root,
            "limit": self._limit.text,
            "rows": [asdict(row) for row in self.rows],
            "average_busbw": self._average,
        }

    @property
    def _average(self) -> float:
        return fmean(row.busbw for row in self.rows)

    def _make_row(self, measured: Measurement) -> SizeRow:
        size, own = measured.size, measured.times[OWN]
        factor = self._operation.bus_factor(self.world.size)
        peers = {}
        for name in self.plan.peers:
            theirs = measured.times[name]
            busbw = _bandwidth(size, theirs.median) * factor
            ratio = median_ratio(theirs.blocks, own.blocks)
            peers[name] = PeerFigures(theirs.median, theirs.p99, busbw, ratio, measured.wrong.get(name, 0))
        algbw = _bandwidth(size, own.median)
        return SizeRow(
            size=size,
            count=measured.count,
            time_us=own.median,
            algbw=algbw,
            busbw=algbw * factor,
            wrong=measured.wrong.get(OWN, 0),
            p99_us=own.p99,
            limit_us=self._limit.microseconds(measured),
            limit=self._limit.share(measured),
            peers=peers,
            backend=measured.backend,
            algorithm=measured.algorithm,
        )

    def _format(self, row: SizeRow) -> str:
        cells = [
            str(row.size),
            str(row.count),
            self.plan.dtype,
            self._operation.redop,
            str(self._operation.root),
            duration(row.time_us),
            f"{row.algbw:.2f}",
            f"{row.busbw:.2f}",
            str(row.wrong),
            duration(row.p99_us),
            NONE if row.limit is None else f"{100 * row.limit:.0f}",
            *(f"{figures.ratio:.2f}" for figures in row.peers.values()),
        ]
        return line(cells, self._columns)


def _backends_text(rows: Sequence[SizeRow]) -> str:
    """Returns "links (direct) up to 4096 B, hierarchical from 16384 B", or a single name for all sizes."""
    groups = [(name, list(group)) for name, group in groupby(rows, attrgetter("way")) if name]
    if len(groups) < 2:
        return groups[0][0] if groups else ""
    first, *others = groups
    texts = [f"{first[0]} up to {first[1][-1].size} B"]
    return ", ".join([*texts, *(f"{name} from {group[0].size} B" for name, group in others)])


def _bandwidth(size: int, microseconds: float) -> float:
    return size / microseconds / 1e3


# ---- The speed that the machine allows: that of a plain copy, or of the network ------------------------


SMALLEST = 64 << 10  # bytes; smaller tensors are bound by the latency of messages, not by a bandwidth
_MEGABYTE = 1e6
_FOR_HOST = (
    "plain TCP from each host to the next, {rate:,.0f} MB/s over {streams} connections on the slowest link, "
    "measured before the operations; the bytes are those that have to leave a host at least"
)
_FOR_MEMORY = (
    "a plain copy of {share:.0%} of the size by all ranks at the same time, in the same rounds: the bytes "
    "that a rank has to read and write at least"
)


class Limit:
    """The least time of an operation at a size, and its description. It is not known for GPUs."""

    def __init__(self, operation: BenchOperation, world: BenchWorld, device: str = CPU) -> None:
        self._operation, self._world, self._device = operation, world, device

    @property
    def text(self) -> str:
        """Describes the limit; "" if there is none."""
        if not self._operation.has_size or self._device != CPU:
            return ""
        if self._world.host_count == 1:
            return _FOR_MEMORY.format(share=self._operation.copied(self._world.size))
        if not self._world.stream:
            return ""
        rate = self._world.stream / _MEGABYTE
        return _FOR_HOST.format(rate=rate, streams=self._world.streams)

    def microseconds(self, measured: Measurement) -> float | None:
        """Returns the least time for that size; None if it is too small, or if no limit was measured."""
        if measured.size < SMALLEST or not self.text:
            return None
        if self._world.host_count == 1:
            return measured.times[COPY].median
        return self._sent(measured.size) / self._world.stream * 1e6

    def share(self, measured: Measurement) -> float | None:
        """Returns the least time as a share of the time of sirtaki's operation."""
        least = self.microseconds(measured)
        if least is None:
            return None
        own = measured.times[OWN]
        if COPY in measured.times:
            return median_ratio(measured.times[COPY].blocks, own.blocks)
        return least / own.median

    def _sent(self, size: int) -> float:
        """Returns the bytes that have to leave each host."""
        hosts = self._world.host_count
        sent = size * self._operation.bus_factor(hosts)
        is_personal = self._operation.parts_in and self._operation.parts_out
        return sent * self._world.size / hosts if is_personal else sent
