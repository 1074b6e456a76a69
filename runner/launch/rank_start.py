"""Starts ranks on the host where this runs."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from sirtaki.bindings.bootstrap.job import name_of
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


def start_ranks(
    command: Sequence[str],
    environment: RankEnvironment,
    placements: Sequence[RankPlacement],
    reaper: Reaper,
    capacity: Capacity,
    terminal_rank: int | None = None,
) -> list[RankProcess]:
    """Starts a process for each placement; the rank `terminal_rank` has the terminal of this process.

    Raises LaunchError if one cannot be started, if memory runs out, or at a signal that asks hvdrun to end.
    """
    ranks: list[RankProcess] = []
    for placement in placements:
        if shortage := capacity.shortage(len(ranks)):
            raise LaunchError(shortage, 1)
        try:
            variables, has_terminal = environment.of(placement, os.environ), placement.rank == terminal_rank
            ranks.append(RankProcess(placement.rank, command, variables, reaper, has_terminal))
        except OSError as error:
            text = describe_start_failure(placement.rank, command, error)
            raise LaunchError(text, NOT_EXECUTABLE) from None
    return ranks


def start_servers(environment: RankEnvironment, numbers: Sequence[int], reaper: Reaper) -> list[RankProcess]:
    """Starts the servers of tables with these numbers. Raises LaunchError as `start_ranks` does."""
    try:
        return [
            RankProcess(number, SERVER_COMMAND, environment.of_server(number, os.environ), reaper)
            for number in numbers
        ]
    except OSError as error:
        text = describe_start_failure(numbers[0], SERVER_COMMAND, error)
        raise LaunchError(text, NOT_EXECUTABLE) from None


def describe_start_failure(rank: int, command: Sequence[str], error: OSError) -> str:
    if error.errno == errno.ENOEXEC:
        return f"{command[0]} is neither a program nor a script that begins with '#!'"
    return f"cannot start {name_of(rank)}: {command[0]}: {error.strerror}"
