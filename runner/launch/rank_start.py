"""Starts ranks and servers of tables on the host where this runs."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.cli.command import NOT_EXECUTABLE, module_words
from sirtaki.runner.launch.capacity import Capacity
from sirtaki.runner.launch.environment import RankEnvironment
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.process import RankProcess
from sirtaki.runner.launch.reaper import Reaper

SERVER_COMMAND = [sys.executable, *module_words("sirtaki.torch.training.stale.serving")]
REPORTS = "SIRTAKI_DUMP_DIRECTORY"
TIMELINE = "SIRTAKI_TIMELINE"


def report_file(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's failure report."""
    return folder / f"rank{rank}.json"


def remove_reports(folder: Path, ranks: Iterable[int]) -> None:
    """Removes the failure reports that an earlier job left for these ranks; call before the ranks start.

    A rank removes its own old report only in `hvd.init()`, which it may not reach.

    Raises LaunchError if one cannot be removed: it would be taken for a report of this job.
    """
    for file in (report_file(folder, rank) for rank in ranks):
        try:
            file.unlink()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            text = f"cannot remove {file}, a failure report of an earlier job: {error.strerror}"
            raise LaunchError(
                f"{text}. Remove it, or choose another folder with --dump-directory", 1
            ) from None


class ProcessStart(NamedTuple):
    """The start of a process; `name` is its name in messages."""

    number: int
    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


def starts_of(
    command: Sequence[str],
    environment: RankEnvironment,
    base: Mapping[str, str],
    placements: Sequence[RankPlacement],
    servers: Sequence[int],
) -> Iterator[ProcessStart]:
    """Yields the starts of a host's ranks, and of its servers of tables, by their numbers."""
    for placement in placements:
        yield ProcessStart(placement.rank, f"rank {placement.rank}", command, environment.of(placement, base))
    for number in servers:
        index = number - placements[0].size
        yield ProcessStart(number, f"server {index}", SERVER_COMMAND, environment.of_server(index, base))


def start_processes(
    starts: Iterable[ProcessStart], reaper: Reaper, capacity: Capacity, terminal_rank: int | None = None
) -> list[RankProcess]:
    """Starts processes; the rank `terminal_rank` has the terminal of this process.

    Raises LaunchError if one cannot be started, if memory runs out, or at a signal that asks hvdrun to end.
    """
    processes: list[RankProcess] = []
    for number, name, command, environment in starts:
        if shortage := capacity.shortage(len(processes)):
            raise LaunchError(shortage, 1)
        try:
            processes.append(RankProcess(number, command, environment, reaper, number == terminal_rank))
        except OSError as error:
            text = describe_start_failure(name, command, error)
            raise LaunchError(text, NOT_EXECUTABLE) from None
    return processes


def describe_start_failure(name: str, command: Sequence[str], error: OSError) -> str:
    if error.errno == errno.ENOEXEC:
        return f"{command[0]} is neither a program nor a script that begins with '#!'"
    return f"cannot start {name}: {command[0]}: {error.strerror}"
