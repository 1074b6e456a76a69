"""The ranks of one host as seen by its agent, which starts them from one message and collects their files."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.capacity import Capacity
from sirtaki.runner.endpoints import Endpoints
from sirtaki.runner.environment import RankEnvironment, encrypts, merge_login, thread_counts
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.failure_analysis import ExitStatus
from sirtaki.runner.frames import LIMITS, Frame, Kind
from sirtaki.runner.job_folder import JobFolder
from sirtaki.runner.process import RankProcess
from sirtaki.runner.rank_start import (
    REPORTS,
    SERVER_COMMAND,
    TIMELINE,
    describe_start_failure,
    remove_reports,
    report_file,
)
from sirtaki.runner.reaper import Reaper
from sirtaki.runner.rendezvous.address import unix_address
from sirtaki.runner.rendezvous.descriptor_limit import allow_descriptors
from sirtaki.runner.rendezvous.job import Job, RendezvousError
from sirtaki.runner.timeline_files import elastic_parts, rank_file

if TYPE_CHECKING:  # some jobs need none of it
    from sirtaki.runner.elastic.host_spares import HostSpares
    from sirtaki.runner.elastic.spare_process import SpareProcess
    from sirtaki.runner.rendezvous.rendezvous_collector import RendezvousCollector

_PIECE_BYTES = 64 * 1024
# Descriptors: the ends of two pipes, and up to three connections to the collector: at two addresses during a
# handshake, and one for calls.
_PER_RANK = 5


class AgentJob:
    """The ranks of this host, and the servers and spares, if any. `values` are those of the START frame."""

    def __init__(self, values: Mapping[str, Any], cores: int, reaper: Reaper) -> None:
        """Raises LaunchError, or KeyError, TypeError or ValueError if the values are malformed."""
        self._reaper = reaper
        self.comes_and_goes = "slots" in values  # its ranks are started one by one, and replaced
        self._servers = [int(number) for number in values.get("servers", [])]
        count = int(values["slots"]) if self.comes_and_goes else len(values["placements"])
        self.lease_seconds = float(values.get("lease", 0.0))
        self._capacity = Capacity(count, cores, servers=len(self._servers))
        if not values.get("oversubscribe"):
            self._capacity.check()
        self._job_folder = JobFolder(reaper, bytes.fromhex(values["key"]))
        self.folder = self._job_folder.path
        self._timeline = self.folder / "timeline"
        self._command = [str(one) for one in values["command"]]
        self._placements = [RankPlacement(*map(int, placement)) for placement in values["placements"]]
        self._base = merge_login({str(k): str(v) for k, v in values["environment"].items()}, os.environ)
        additions = thread_counts(count + len(self._servers), cores, self._base)
        additions |= {str(k): str(v) for k, v in values["additions"].items()}
        self.endpoints = Endpoints(_say)
        if (address := values.get("metrics")) is not None:
            self.endpoints.serve_metrics(str(address), self.folder, reaper)
        additions.setdefault(REPORTS, str(self.folder))
        self._reports = Path(additions[REPORTS])
        remove_reports(self._reports, [placement.rank for placement in self._placements])
        if TIMELINE in additions:
            additions[TIMELINE] = str(self._timeline)
        self._collector = self._make_collector(values, additions)
        self._environment = RankEnvironment(
            str(values["job"]),
            str(values["rendezvous"]) if self._collector is None else self._collector.address,
            self._job_folder.key_file,
            float(values["start_timeout"]),
            additions,
            {str(k): str(v) for k, v in values.get("torch", {}).items()},
        )
        self._reported_ranks: set[int] = set()
        self.running: list[RankProcess] = []
        self.spares: HostSpares | None = None

    def _make_collector(
        self, values: Mapping[str, Any], additions: Mapping[str, str]
    ) -> RendezvousCollector | None:
        """Creates the collector of this host's ranks; returns None where they connect to hvdrun directly.

        A single rank does. In an elastic job each generation has a rendezvous of its own.
        """
        count = len(self._placements)
        if self.comes_and_goes or count < 2:
            return None
        from sirtaki.runner.rendezvous.rendezvous_collector import RendezvousCollector

        allow_descriptors(_PER_RANK * count)
        encrypt = encrypts({**self._base, **additions})
        job = Job(
            str(values["job"]), self._placements[0].size, bytes.fromhex(values["key"]), VERSION, encrypt
        )
        name = f"sirtaki-{secrets.token_hex(16)}"  # the second address serves when this folder is removed
        address = ",".join(dict.fromkeys([unix_address(name, str(self.folder)), unix_address(name)]))
        timeout = float(values["start_timeout"])
        try:
            return RendezvousCollector(address, job, str(values["rendezvous"]), count, timeout, _say)
        except RendezvousError as error:
            raise LaunchError(str(error)) from None

    def start(self, send: Callable[[Frame], None]) -> None:
        """Starts all ranks, and reports the process of each, or why it could not be started.

        Afterwards starts the collector's thread; signals are blocked meanwhile.
        """
        for placement in self._placements:
            if shortage := self._capacity.shortage(len(self.running)):
                raise LaunchError(shortage)
            self._start(placement.rank, self._environment.of(placement, self._base), send)
        for number in self._servers:
            self._start(number, self._environment.of_server(number, self._base), send, SERVER_COMMAND)
        if self._collector is not None:
            self._collector.start()

    def launch(
        self, rank: int, values: Mapping[str, Any], send: Callable[[Frame], None]
    ) -> RankProcess | None:
        """Makes the spare that the values name one more rank, or else starts a process, and returns that.

        Returns None if it cannot be started. Raises KeyError, TypeError or ValueError if the values are
        malformed.
        """
        environment = self._environment_of(values)
        if self.spares is not None and "spare" in values:
            with contextlib.suppress(OSError):  # the spare will name what is missing
                self._job_folder.restore_key()
            spare = self.spares.take(int(values["spare"]), rank, environment)
            if spare is not None:
                self._note_start(spare, send)
                return None
        return self._start(rank, environment, send)

    def spare_start(self, values: Mapping[str, Any]) -> Callable[[], SpareProcess]:
        """Returns a function that starts a spare, whose additions to the environment come with the values.

        Raises KeyError, TypeError or ValueError if the values are malformed; the function raises OSError or
        LaunchError.
        """
        from sirtaki.runner.elastic.spare_command import check_spare_command
        from sirtaki.runner.elastic.spare_process import SpareProcess

        environment, runs_script = self._environment_of(values), bool(values["runs_script"])

        def start() -> SpareProcess:
            check_spare_command(self._command)  # a script may differ from the one on hvdrun's host
            return SpareProcess(self._command, environment, self.folder, runs_script, self._reaper)

        return start

    def _environment_of(self, values: Mapping[str, Any]) -> dict[str, str]:
        placement = RankPlacement(*map(int, values["placement"]))
        additions = {str(k): str(v) for k, v in values["additions"].items()}
        return {**self._environment.of(placement, self._base), **additions}

    def _start(
        self,
        rank: int,
        environment: Mapping[str, str],
        send: Callable[[Frame], None],
        command: Sequence[str] = (),
    ) -> RankProcess | None:
        command = command or self._command
        try:
            self._job_folder.restore_key()
            process = RankProcess(rank, command, environment, self._reaper)
        except OSError as error:
            text = describe_start_failure(rank, command, error)
        except LaunchError:
            if not self.comes_and_goes:
                raise
            text = "a rank was not started, because this host's part in the job is to end"
        else:
            self._note_start(process, send)
            return process
        send(Frame(Kind.REFUSED, rank, text.encode(errors="replace")))
        return None

    def _note_start(self, process: RankProcess, send: Callable[[Frame], None]) -> None:
        self.running.append(process)
        send(Frame.of_number(Kind.STARTED, process.rank, process.pid))

    def poll(self) -> Iterator[ExitStatus]:
        """Yields how ranks have ended since the last call; spares report that themselves."""
        if self.spares is not None:
            self.spares.check()
        for rank in self.running:
            if status := rank.check():
                if self.comes_and_goes and status.failed:
                    rank.clear()
                yield status

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to the newest rank of this number; SIGKILL also to what it has left behind."""
        newest = next((one for one in reversed(self.running) if one.rank == rank), None)
        if newest is not None and (newest.exit_status is None or number == signal.SIGKILL):
            newest.signal(number)

    def kill(self) -> None:
        """Kills all ranks and spares."""
        for one in self.running:
            one.signal(signal.SIGKILL)
        if self.spares is not None:
            self.spares.kill()

    def close_collector(self) -> None:
        """Ends the collector, if there is one: all ranks have ended."""
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    def reap(self) -> None:
        for rank in self.running:
            if rank.exit_status:
                rank.reap()
        if self.spares is not None:
            self.spares.reap()

    def new_reports(self) -> Iterator[Frame]:
        """Yields the failure reports that ranks have written since the last call."""
        for placement in self._placements:
            file = report_file(self._reports, placement.rank)
            if placement.rank in self._reported_ranks or not file.is_file():
                continue
            self._reported_ranks.add(placement.rank)
            with open(file, "rb") as opened:
                content = opened.read(LIMITS[Kind.REPORT] + 1)
            if len(content) <= LIMITS[Kind.REPORT]:
                yield Frame(Kind.REPORT, placement.rank, content)

    def timelines(self) -> Iterator[Frame]:
        """Yields the timelines of all ranks, in pieces."""
        for placement in self._placements:
            for piece in _pieces(rank_file(self._timeline, placement.rank)):
                yield Frame(Kind.TIMELINE, placement.rank, piece)
        for part in elastic_parts(self._timeline):
            for piece in _pieces(part.file(self._timeline)):
                yield Frame.of_piece(Kind.WORKER_TIMELINE, part.worker, part.generation, piece)


def _pieces(file: Path) -> Iterator[bytes]:
    if file.is_file():
        with open(file, "rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                yield piece


def _say(line: str) -> None:
    """Shows a line on hvdrun's standard error, behind the name of this host."""
    print(line, file=sys.stderr, flush=True)
