"""The command line of `sirtaki bench`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import queue
import re
import subprocess
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.runner.bench.collective_report import (
    CollectiveReport,
    Column,
    Load,
    Report,
    comment,
    line,
)
from sirtaki.runner.bench.messages import (
    EXCHANGE,
    OWN,
    SYNC,
    BenchWorld,
    LinkSpeeds,
    Message,
    Plan,
    Refusal,
    StepTimes,
    read,
)
from sirtaki.runner.bench.operations import ITEMSIZES, OPERATIONS, check_range, parse_factor, parse_size
from sirtaki.runner.bench.peers import (
    CPU,
    CUDA,
    DEVICES,
    GLOO,
    MPI,
    NCCL,
    PEERS,
    check_peers,
    left_out,
    mpirun,
)
from sirtaki.runner.bench.samples import median_ratio
from sirtaki.runner.cli.command import module_words, terminal_status
from sirtaki.runner.cli.options import OptionParser, add_options_for_hosts, known_names, whole_number
from sirtaki.runner.launch.capacity import usable_cores
from sirtaki.runner.launch.child_process import ChildProcess
from sirtaki.runner.launch.environment import outside_of_a_rank
from sirtaki.runner.launch.errors import LaunchError, explained
from sirtaki.runner.launch.hosts import find_allocation

_USAGE = "sirtaki bench [OPERATION] -np N [-H HOST:SLOTS,… | --hostfile FILE] [options]"
_DESCRIPTION = (
    "Measures an operation by size of the tensors, in the columns of nccl-tests, beside the limit of this "
    "machine and beside other libraries. Results are checked. Exits with 0 if they are right, 1 if one is "
    "wrong, 2 if it could not run."
)
_STDOUT = "-"


def main(arguments: Sequence[str]) -> int:
    """Runs the measurement and returns its exit code. Raises LaunchError if it cannot."""
    options = parser().parse_args(arguments)
    plan = make_plan(options)
    with terminal_status("starting ranks") as note:
        report = _measure(options, plan, note)
    if options.json != _STDOUT:
        print("\n".join(report.foot_lines()))
    if options.json is not None:
        _write_json(options.json, report)
    if options.plot is not None and isinstance(report, CollectiveReport):
        draw(report, options.plot)
    return report.exit_code


def parser() -> OptionParser:
    """Returns the parser of the options."""
    options = OptionParser(prog="sirtaki bench", usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False)
    options.example = "for example: sirtaki bench allreduce -np 2"
    add = options.add_argument
    names = f"{', '.join(KINDS)} (allreduce)"
    add("operation", nargs="?", metavar="OPERATION", default="allreduce", help=names)
    add("-np", "-n", "--num-proc", dest="size", metavar="N", type=whole_number, help="number of ranks")
    add("--oversubscribe", action="store_true", help="start more than 16 ranks per core")
    add_options_for_hosts(options)
    add("-b", dest="first", metavar="SIZE", type=parse_size, help="the first size, in bytes (8)")
    add("-e", dest="last", metavar="SIZE", type=parse_size, help="the last size (64M)")
    add("-f", dest="factor", metavar="FACTOR", type=parse_factor, help="between two sizes (4)")
    add("-d", dest="dtype", metavar="DTYPE", help=f"{', '.join(ITEMSIZES)} (float32)")
    add("--device", metavar="DEVICE", help="cpu or cuda, where tensors are (cpu)")
    add("--rounds", metavar="N", type=whole_number, default=11, help="blocks of calls for each size (11)")
    add("--peers", metavar="NAME,…", default="", help=f"also measure {', '.join(PEERS)}, in turns")
    picture = f"draw the bandwidths to FILE, which ends with {' or '.join(SUFFIXES)}"
    add("--plot", metavar="FILE", type=Path, help=picture)
    add(
        "--json", metavar="FILE", help="also write the figures as JSON to FILE; - prints them instead of text"
    )
    options.set_defaults(**{name: setting.default for name, setting in SETTINGS.items()})
    return options


def _measure(options: argparse.Namespace, plan: Plan, note: Callable[[str], None]) -> Report:
    """Runs the ranks, and shows each result as soon as it has come."""

    def show(lines: Iterable[str]) -> None:
        text = "\n".join(lines)
        if options.json != _STDOUT:
            note("")
            print(text, flush=True)

    load = Load(os.getloadavg()[0], usable_cores())
    report: Report | None = None
    refusal = ""
    kind = KINDS[plan.operation]
    blocks = 1 if kind.tells_each_block else 1 + plan.rounds
    with contextlib.closing(messages(command(options, plan), environment(plan), blocks)) as received:
        for message in received:
            if isinstance(message, str):
                note(message)
            elif isinstance(message, Refusal):
                refusal = message.reason  # raised when the ranks have ended
            elif isinstance(message, BenchWorld):
                report = kind.report(plan, message, load)
                show(report.head_lines())
            elif report is not None:
                show(report.take(message))
    if refusal:
        raise LaunchError(refusal)
    if report is None or not report.rows:
        raise LaunchError("the ranks have ended without a result")
    return report


def _write_json(path: str, report: Report) -> None:
    text = report.as_json() + "\n"
    if path == _STDOUT:
        sys.stdout.write(text)
        return
    with explained(f"cannot write {path}"):
        Path(path).write_text(text)


# Checks the options of `sirtaki bench` before anything is started, and makes the ranks' plan of them.


_MOST_ROUNDS = 200  # ranks send a figure for each


def make_plan(options: Namespace) -> Plan:
    """Returns the plan that the options ask for. Raises LaunchError if there can be none."""
    kind = KINDS.get(options.operation)
    if kind is None:
        raise LaunchError(f"there is no operation {options.operation!r}: choose one of {', '.join(KINDS)}")
    if options.dtype not in ITEMSIZES:
        raise LaunchError(f"-d takes {', '.join(ITEMSIZES)}, not {options.dtype!r}")
    if options.rounds > _MOST_ROUNDS:
        raise LaunchError(f"--rounds takes at most {_MOST_ROUNDS}, not {options.rounds}")
    for name, setting in SETTINGS.items():
        if name not in kind.settings and getattr(options, name) != setting.default:
            raise LaunchError(f"{options.operation} is measured without {setting.flag}: leave it out")
    if "first" in kind.settings:
        check_range(options.first, options.last, options.factor)
    if options.device not in DEVICES:
        raise LaunchError(f"--device takes {' or '.join(DEVICES)}, not {options.device!r}")
    named = known_names(options.peers, PEERS, "peer", "--peers")
    others = left_out(named, options.device)
    peers = [name for name in named if name not in others]
    for name in named:
        if name not in kind.peers:
            taken = ", ".join(kind.peers) or "none"
            raise LaunchError(f"{options.operation} is not measured with the peer {name}: it takes {taken}")
    _check_ranks(options, peers)
    extra = "torch" if options.device == CUDA else kind.extra
    if importlib.util.find_spec(extra) is None:
        raise LaunchError(f"{options.operation} needs {extra}: pip install 'sirtaki[{extra}]'")
    check_peers(peers, options.dtype)
    if options.plot is not None:
        check_plot(options.plot)
    sizes = options.first, options.last, options.factor
    return Plan(options.operation, options.dtype, *sizes, options.rounds, peers, options.device, others)


def _check_ranks(options: Namespace, peers: Sequence[str]) -> None:
    """Raises LaunchError if there are too few ranks, or if MPI would have to start them elsewhere."""
    if options.size == 1:
        raise LaunchError("one rank exchanges nothing: measure with -np 2 or more")
    has_hosts = options.hosts is not None or options.hostfile is not None
    if options.size is None and not has_hosts and find_allocation(os.environ) is None:
        raise LaunchError("the number of ranks is missing: give it with -np, for example -np 2")
    if MPI in peers and (has_hosts or options.size is None):
        raise LaunchError(
            f"the peer {MPI} is measured on this host only: give -np, and leave out -H and --hostfile"
        )


# ---- Draws bus bandwidth by size, as PNG or SVG, with matplotlib ---------------------------------------


SUFFIXES = (".png", ".svg")
_SIZE, _DOTS_PER_INCH = (8.0, 4.2), 144
# Colours of the palette by Okabe and Ito, which colour-blind readers tell apart.
_OWN, _LIMIT, _PEERS = "#0072b2", "#333333", ("#d55e00", "#009e73")
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def check_plot(path: Path) -> None:
    """Raises LaunchError if no picture can be drawn, before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise LaunchError(f"--plot writes {' or '.join(SUFFIXES)}, not {path.name!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise LaunchError("--plot needs matplotlib: pip install 'sirtaki[plot]'")
    if not path.absolute().parent.is_dir():
        raise LaunchError(f"cannot write {path}: there is no folder {path.parent}")


def draw(report: CollectiveReport, path: Path) -> None:
    """Writes the picture. Raises LaunchError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE)
    axes = figure.subplots()
    rows = report.rows
    sizes = [row.size for row in rows]
    for name, color in zip(report.plan.peers, _PEERS, strict=False):
        axes.plot(sizes, [row.peers[name].busbw for row in rows], marker=".", color=color, label=name)
    bounded = [(row.size, row.busbw / row.limit) for row in rows if row.limit]
    if bounded:
        axes.plot(*zip(*bounded, strict=True), linestyle=":", color=_LIMIT, label="limit")
    axes.plot(
        sizes,
        [row.busbw for row in rows],
        marker="o",
        markersize=4,
        linewidth=2.4,
        color=_OWN,
        label="sirtaki",
    )
    _label(axes, report, sizes)
    figure.tight_layout()
    with explained(f"cannot write {path}"):
        figure.savefig(path, dpi=_DOTS_PER_INCH)


def _label(axes: Any, report: CollectiveReport, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_readable(size) for size in sizes], rotation=45)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    plan = report.plan
    axes.set_title(f"{plan.operation}, {plan.dtype}, {report.world.size} ranks", loc="left")


def _readable(size: int) -> str:
    divisor, unit = next((divisor, unit) for divisor, unit in _UNITS if size >= divisor)
    return f"{size / divisor:.3g} {unit}"


# ---- Starts the ranks of a measurement, and reads the messages that rank 0 prints ----------------------


SILENCE_SECONDS = 300.0  # for a block of calls: the longest time in which rank 0 prints nothing
_END_SECONDS = 20.0
_LAST_LINES = 40
_WORKER = "sirtaki.bench.worker"
# hvdrun's own lines, and those in which mpirun or a rank names a rank.
_VERDICT = re.compile(r"^hvdrun: .*|.*\brank \d+\b.*")


def command(options: Namespace, plan: Plan) -> list[str]:
    """Returns the command that runs the ranks.

    mpirun starts them if MPI is a peer, so that all implementations take turns in the same processes.
    """
    worker = [sys.executable, *module_words(_WORKER), plan.encode()]
    if MPI in plan.peers:
        # Ranks that are bound to cores would be compared with others that are not.
        spread = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        return [mpirun(), *spread, "-np", str(options.size), *worker]
    return [sys.executable, *module_words("sirtaki.runner"), *_launch_options(options, plan), *worker]


def _launch_options(options: Namespace, plan: Plan) -> list[str]:
    """Returns the options of hvdrun that name ranks and hosts."""
    given = {
        "-np": options.size,
        "-H": options.hosts,
        "--hostfile": options.hostfile,
        "--launcher": options.launcher,
        "-p": options.ssh_port,
        "-i": options.ssh_identity_file,
        "--network-interfaces": ",".join(options.network_interfaces),
    }
    words = [word for flag, value in given.items() if value for word in (flag, str(value))]
    switches = {
        "--torch-env": not {GLOO, NCCL}.isdisjoint(plan.peers),
        "--oversubscribe": options.oversubscribe,
    }
    return [*words, *(flag for flag, is_on in switches.items() if is_on)]


def environment(plan: Plan) -> dict[str, str]:
    """Returns the launcher's environment; OMP_NUM_THREADS defaults to 1 except for training steps."""
    inherited = outside_of_a_rank(os.environ)
    return inherited if plan.operation == "step" else {"OMP_NUM_THREADS": "1", **inherited}


def messages(
    arguments: Sequence[str], variables: Mapping[str, str], blocks: int = 1
) -> Generator[Message, None, None]:
    """Runs ranks; yields rank 0's messages as they come, and shows the rest of the output.

    Up to so many `blocks` of calls may lie between two messages. Raises LaunchError if the ranks fail, or are
    silent for too long; it names the rank if one is known.
    """
    silence = SILENCE_SECONDS * blocks
    received: queue.Queue[Message | ValueError | None] = queue.Queue()
    verdicts: deque[str] = deque(maxlen=_LAST_LINES)
    child = ChildProcess(arguments, partial(_take, received), partial(_take_error, verdicts), variables)
    try:
        while (message := received.get(timeout=silence)) is not None:
            if isinstance(message, ValueError):
                raise LaunchError(f"a message of rank 0 cannot be read: {message}")
            yield message
        code = child.process.wait(_END_SECONDS)
        child.join(_END_SECONDS)
    except (queue.Empty, subprocess.TimeoutExpired):
        raise LaunchError(f"the ranks have been silent for {silence:g} s, and were ended") from None
    finally:
        child.process.terminate()  # the launcher, which ends the ranks
        child.end(_END_SECONDS)
    if code:
        last = verdicts[-1] if verdicts else f"their launcher ended with exit code {code}"
        raise LaunchError(f"the ranks did not finish: {last}")


def _take(received: queue.Queue[Message | ValueError | None], line: str) -> None:
    """Puts the message in a line into the queue, None at the end; shows a line without a message."""
    if not line:
        received.put(None)
        return
    try:
        message: Message | ValueError | None = read(line)
    except ValueError as error:
        message = error
    if message is None:
        print(line, end="", file=sys.stderr)
    else:
        received.put(message)


def _take_error(verdicts: deque[str], line: str) -> None:
    print(line, end="", file=sys.stderr)
    if _VERDICT.match(line):
        verdicts.append(line.strip().removeprefix("hvdrun: "))


# ---- Everything that `sirtaki bench` can measure: the report, the peers and the package of each --------


# ---- The cost of the exchange in a training step, beside a step without it -----------------------------

_COLUMNS = (
    Column(14, "model"),
    Column(9, "tensors"),
    Column(9, "size", "(MB)"),
    Column(10, "sync", "(ms)"),
    Column(10, "step", "(ms)"),
    Column(10, "exposed", "(ms)"),
    Column(10, "exchange", "(ms)"),
    Column(9, "overlap", "(%)"),
    Column(8, "#wrong"),
)

_EXPLANATIONS = (
    "sync: a step without exchange, whose ranks meet in a barrier; step: one with sirtaki",
    "exposed: the median of step - sync in the same round",
    "exchange: that of all gradients alone; overlap: the part of it that does not lengthen the step",
    "#wrong: elements of the trained parameters that differ from rank 0's by more than rounding",
)


@dataclass(frozen=True)
class StepRow:
    """The figures of a model; times in milliseconds.

    Attributes:
        sync_ms, step_ms: a step without exchange whose ranks meet in a barrier, and one with sirtaki.
        exposed_ms: their difference: the time that the exchange adds.
        exchange_ms: the exchange of all gradients alone.
        overlap: the share of that time which does not lengthen the step.
        peers: a step's time with each peer, as a multiple of sirtaki's.
    """

    model: str
    tensors: int
    bytes: int
    sync_ms: float
    step_ms: float
    exposed_ms: float
    exchange_ms: float
    overlap: float
    wrong: int
    peers: Mapping[str, float]


class StepReport(Report):
    """The result of `sirtaki bench step`."""

    COLUMNS = _COLUMNS
    rows: list[StepRow]

    def take(self, message: object) -> Iterator[str]:
        assert isinstance(message, StepTimes)
        row = make_row(message, self.plan)
        self.rows.append(row)
        cells = [row.model, str(row.tensors), f"{row.bytes / 1e6:.1f}", f"{row.sync_ms:.2f}"]
        cells += [f"{row.step_ms:.2f}", f"{row.exposed_ms:.2f}", f"{row.exchange_ms:.2f}"]
        cells += [f"{100 * row.overlap:.0f}", str(row.wrong)]
        yield line([*cells, *(f"{ratio:.2f}" for ratio in row.peers.values())], self._columns)

    def foot_lines(self) -> Iterator[str]:
        yield from self.verdict_lines()
        yield from map(comment, _EXPLANATIONS)
        for name in self.plan.peers:
            yield comment(f"{name}: a step with DDP over {PEERS[name].title}, as a multiple of sirtaki's")

    def values(self) -> Mapping[str, Any]:
        return {"rows": [asdict(row) for row in self.rows]}


def make_row(measured: StepTimes, plan: Plan) -> StepRow:
    """Derives the figures of a model from its times by round."""
    times = measured.times
    own, sync, exchange = times[OWN], times[SYNC], median(times[EXCHANGE])
    exposed = median(step - alone for step, alone in zip(own, sync, strict=True))
    return StepRow(
        model=measured.model,
        tensors=measured.tensors,
        bytes=measured.bytes,
        sync_ms=median(sync),
        step_ms=median(own),
        exposed_ms=exposed,
        exchange_ms=exchange,
        overlap=min(max(1 - exposed / exchange, 0.0), 1.0),
        wrong=measured.wrong,
        peers={name: median_ratio(times[name], own) for name in plan.peers},
    )


# ---- The speed and latency of each connection between ranks, as two matrices ---------------------------

_MAX_NAME = 40
_WIDTH = 10


class LinkReport(Report):
    """The result of `sirtaki bench link`, which is a single message of the ranks."""

    rows: list[LinkSpeeds]

    def take(self, message: object) -> Iterator[str]:
        assert isinstance(message, LinkSpeeds)
        self.rows.append(message)
        yield f"# GB/s in messages of {self.plan.last} bytes, from the rank of the line to that of the column"
        yield from _matrix(message, [[value / 1e9 for value in row] for row in message.rates], 3)
        yield "#"
        yield "# us for a message of 8 bytes: half of the median round trip"
        yield from _matrix(message, message.latencies, 2)
        yield "#"

    def foot_lines(self) -> Iterator[str]:
        yield from self.verdict_lines()
        if self.world.stream:
            yield comment(
                f"plain TCP from each host to the next: {self.world.stream / 1e9:.3f} GB/s over "
                f"{self.world.streams} connections on the slowest link"
            )

    def values(self) -> Mapping[str, Any]:
        (speeds,) = self.rows
        return {
            "size": self.plan.last,
            "link_ranks": list(speeds.ranks),
            "link_hosts": list(speeds.hosts),
            "bytes_per_second": [list(row) for row in speeds.rates],
            "latency_us": [list(row) for row in speeds.latencies],
        }


def _matrix(speeds: LinkSpeeds, values: Sequence[Sequence[float]], digits: int) -> Iterator[str]:
    pairs = zip(speeds.ranks, speeds.hosts, strict=True)
    names = [f"{rank} ({printable(host, _MAX_NAME)})" for rank, host in pairs]
    left = max(map(len, names))
    yield "# " + " " * left + "".join(f"{rank:>{_WIDTH}}" for rank in speeds.ranks)
    for own, (name, row) in enumerate(zip(names, values, strict=True)):
        cells = ("-" if index == own else f"{value:.{digits}f}" for index, value in enumerate(row))
        yield f"  {name:<{left}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells)


class MeasurementKind(NamedTuple):
    """A measurement.

    Attributes:
        report: makes its report.
        peers: the libraries that offer it.
        settings: those of SETTINGS that it has.
        extra: the extra of sirtaki's package that its ranks need.
        tells_each_block: whether rank 0 sends a message for each block of calls, and not one for all rounds.
    """

    report: Callable[[Plan, BenchWorld, Load], Report]
    peers: Sequence[str]
    settings: Collection[str] = ()
    extra: str = "numpy"
    tells_each_block: bool = False


class KindOption(NamedTuple):
    """An option that not every measurement has, and its default."""

    flag: str
    default: Any


SETTINGS = {
    "first": KindOption("-b", 8),
    "last": KindOption("-e", 64 << 20),
    "factor": KindOption("-f", 4.0),
    "dtype": KindOption("-d", "float32"),
    "plot": KindOption("--plot", None),
    "device": KindOption("--device", CPU),
}
KINDS = {
    **{
        name: MeasurementKind(
            CollectiveReport,
            tuple(PEERS),
            SETTINGS if bench_operation.has_size else ("device",),
            tells_each_block=True,
        )
        for name, bench_operation in OPERATIONS.items()
    },
    "step": MeasurementKind(StepReport, (GLOO,), extra="torch"),
    "link": MeasurementKind(LinkReport, (), ("last",)),
}
