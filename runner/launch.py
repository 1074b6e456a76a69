"""Sets up a job: guard, hosts, key, rendezvous and ranks; then the supervisor takes over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import selectors
import socket
import stat
import struct
import termios
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sirtaki._core._version import VERSION
from sirtaki._core.bootstrap.address import unix_address
from sirtaki._core.bootstrap.handshake import BootstrapError, Job
from sirtaki._core.bootstrap.key import write_key
from sirtaki._core.bootstrap.store_server import StoreServer

from .command import runs_python
from .cores import usable_cores
from .culprit import Inquiry
from .display import Display
from .environment import RankEnvironment, exported, thread_counts
from .epilogue import Epilogue
from .errors import LaunchError
from .guard import Guard
from .hosts import Host, Place, Share, fill, is_own_host, needed, places_of
from .private_folder import make_private_folder
from .process import Rank
from .progress import Progress
from .room import Room
from .signals import Bell
from .ssh import SshOptions
from .start import REPORTS, start_ranks
from .supervisor import Mailbox, Supervisor
from .timeline import remove_timelines

if TYPE_CHECKING:  # not needed on a single host
    from .remote import RemoteHost


@dataclass(frozen=True)
class Settings:
    """The user's settings for a job."""

    hosts: Sequence[Host]  # this host is called "localhost"
    size: int | None  # None: one rank for each slot
    command: Sequence[str]  # the path of a program, and its arguments
    start_timeout: float = 120.0  # seconds
    output_folder: Path | None = None
    verbose: bool = False
    additions: Mapping[str, str] = field(default_factory=dict)  # to the ranks' environment
    timeline: Path | None = None  # the merged timeline of all ranks
    notices: tuple[str, ...] = ()  # shown before anything else
    ssh: SshOptions = field(default_factory=SshOptions)
    interfaces: tuple[str, ...] = ()  # the only ones that ranks use to reach each other; () for all
    oversubscribe: bool = False  # start ranks although a host seems to lack room for them


def run_job(settings: Settings) -> int:
    """Runs a job to its end and returns hvdrun's exit code. Raises LaunchError if it cannot start."""
    if not os.path.exists("/proc/self/stat"):
        raise LaunchError("sirtaki needs the file system /proc, which is not mounted here", 1)
    with contextlib.closing(Bell()) as bell, Guard() as guard:
        bell.hold_back()
        return _Launch(settings, bell, guard).run()


class _Launch:
    """The steps of one job's launch, from the user's settings to the supervisor."""

    def __init__(self, settings: Settings, bell: Bell, guard: Guard) -> None:
        self._settings = settings
        self._bell = bell
        self._guard = guard
        self._mailbox = Mailbox(bell)
        self._selector = selectors.PollSelector()  # epoll refuses regular files
        self._display = Display(self._selector, settings.verbose)
        self._room: Room | None = None  # for the ranks of this host

    def run(self) -> int:
        settings, display = self._settings, self._display
        for notice in settings.notices:
            display.say(notice)
        remotes, shares = self._reach_hosts()
        places = places_of(shares)
        display.expect(len(places), settings.output_folder)
        folder = Path(make_private_folder(self._guard))
        key_file = str(folder / "key")
        encrypt = _encrypts({**os.environ, **settings.additions})
        job = Job(secrets.token_hex(8), len(places), _write_key(key_file), VERSION, encrypt)
        server = self._make_server(job, str(folder), several_hosts=bool(remotes))
        epilogue = self._make_epilogue(len(places), folder, bool(remotes))
        self._inquiry = Inquiry(settings.start_timeout, runs_python(settings.command))
        ranks: dict[int, Rank] = {}
        for share in shares:  # forks, so it must precede the first thread
            if is_own_host(share.host.name):
                environment = self._environment_of(job, server.address, key_file, epilogue, share)
                ranks |= self._start_here(environment, [places[rank] for rank in share.ranks])
        for remote in remotes:
            for share in (share for share in shares if share.host.name == remote.name):
                values = self._start_values(job, server.address, [places[rank] for rank in share.ranks])
                ranks |= self._start_there(remote, values, share.ranks, epilogue)
        server.start()
        if _input_is_lost():
            display.say("standard input is not passed on: every rank reads /dev/null")
        in_order = [ranks[rank] for rank in sorted(ranks)]
        progress = self._progress(shares)
        supervisor = Supervisor(
            in_order, remotes, display, self._selector, self._inquiry, server, epilogue, progress
        )
        if self._room is not None:
            supervisor.watch_memory(self._room, settings.start_timeout)
        return supervisor.run(self._bell, self._mailbox, self._guard)

    def _reach_hosts(self) -> tuple[list[RemoteHost], list[Share]]:
        """Connects to the other hosts, if any; returns them, and the ranks of each host."""
        settings = self._settings
        hosts = needed(settings.hosts, settings.size)
        shares = fill(hosts, settings.size) if all(host.slots for host in hosts) else []
        if shares and all(is_own_host(share.host.name) for share in shares):
            return [], shares
        from .connect import Connection, with_slots
        from .cores import count_gpus

        connection = Connection(settings.ssh, self._selector, self._display)
        remotes = connection.reach(hosts, settings.command[0], self._bell, self._guard)
        return remotes, fill(with_slots(hosts, remotes, count_gpus()), settings.size)

    def _make_server(self, job: Job, folder: str, several_hosts: bool) -> StoreServer:
        """Creates the rendezvous: a Unix socket for ranks of this host, all of this machine's addresses for
        others.

        The abstract socket serves another init() after the system has cleaned the job's folder away.
        """
        name = f"sirtaki-{job.id}"
        address = ",".join(dict.fromkeys([unix_address(name, folder), unix_address(name)]))
        if several_hosts:
            address += ",[::]:0" if socket.has_dualstack_ipv6() else ",0.0.0.0:0"
        settings = self._settings
        try:
            if several_hosts and job.encrypt:
                from sirtaki._core.bootstrap.encryption import own_certificate  # opens the core

                own_certificate()
            server = StoreServer(address, job, settings.start_timeout, self._mailbox.put, settings.interfaces)
        except BootstrapError as error:
            raise LaunchError(str(error), 1) from None
        if several_hosts and not addresses_for_others(server.address):
            server.close()
            raise LaunchError(
                "this machine has no address at which other hosts could reach it, besides its loopback one", 1
            )
        return server

    def _environment_of(
        self, job: Job, rendezvous: str, key_file: str, epilogue: Epilogue, share: Share
    ) -> RankEnvironment:
        settings = self._settings
        cores = usable_cores()
        threads = thread_counts(len(share.ranks), cores, os.environ)
        if threads:
            self._display.say(_describe_threads(threads, len(share.ranks), cores))
        additions = {**threads, **settings.additions, REPORTS: str(epilogue.reports)}
        return RankEnvironment(job.id, rendezvous, key_file, settings.start_timeout, additions)

    def _start_here(self, environment: RankEnvironment, places: Sequence[Place]) -> dict[int, Rank]:
        room = self._room = Room(len(places), usable_cores())
        if not self._settings.oversubscribe:
            room.check()
        started = start_ranks(self._settings.command, environment, places, self._guard, room)
        for rank in started:
            self._display.read_rank(rank.rank, rank.stdout, rank.stderr)
            self._note_start("", rank.rank, rank.pid)
        return {rank.rank: rank for rank in started}

    def _start_values(self, job: Job, rendezvous: str, places: Sequence[Place]) -> dict[str, Any]:
        """Returns everything that an agent needs to start its ranks: the input of `AgentJob`."""
        settings = self._settings
        additions = dict(settings.additions)
        if folder := os.environ.get(REPORTS):
            additions.setdefault(REPORTS, folder)
        return {
            "job": job.id,
            "key": job.key.hex(),
            "rendezvous": addresses_for_others(rendezvous),
            "start_timeout": settings.start_timeout,
            "command": [os.path.abspath(settings.command[0]), *settings.command[1:]],
            "environment": exported(os.environ),
            "additions": additions,
            "places": [astuple(place) for place in places],
            "oversubscribe": settings.oversubscribe,
        }

    def _start_there(
        self, remote: RemoteHost, values: dict[str, Any], numbers: range, epilogue: Epilogue
    ) -> dict[int, Rank]:
        from .remote import RemoteJob, RemoteRank

        ranks = {rank: RemoteRank(rank, remote) for rank in numbers}
        for rank in ranks:
            self._inquiry.note_start(rank, 0, remote.name)
        remote.start(
            values, RemoteJob(ranks, epilogue, partial(self._note_start, remote.name), self._bell.ring)
        )
        return dict(ranks)

    def _note_start(self, host: str, rank: int, pid: int) -> None:
        self._inquiry.note_start(rank, pid, host)
        where = f" on {host}" if host else ""
        self._display.detail(f"rank {rank} is pid {pid}{where}: {' '.join(self._settings.command)}")

    def _make_epilogue(self, size: int, private: Path, several_hosts: bool) -> Epilogue:
        """Creates the epilogue. Failure reports go to the folder that the user chose, else the job's."""
        folder = self._settings.additions.get(REPORTS) or os.environ.get(REPORTS)
        timeline = self._settings.timeline
        if timeline is not None:
            remove_timelines(timeline)
        return Epilogue(size, Path(folder or private).absolute(), bool(folder), timeline, several_hosts)

    def _progress(self, shares: Sequence[Share]) -> Progress:
        names = {
            rank: f"rank {rank}" + ("" if is_own_host(share.host.name) else f" ({share.host.name})")
            for share in shares
            for rank in share.ranks
        }
        return Progress("ranks are here", names, self._display.show_progress, self._display.refreshes)


def _write_key(path: str) -> bytes:
    try:
        return write_key(path)
    except OSError as error:
        raise LaunchError(f"cannot write the job's key to {path}: {error.strerror}", 1) from None


def _encrypts(environment: Mapping[str, str]) -> bool:
    """Returns whether the ranks encrypt connections between hosts, according to their variables."""
    names = ("SIRTAKI_ENCRYPT", "HOROVOD_ENCRYPT")
    return next((environment[name] for name in names if name in environment), "0") == "1"


def addresses_for_others(rendezvous: str) -> str:
    """Returns the rendezvous's addresses that ranks of other hosts may be able to reach."""
    found = [one for one in rendezvous.split(",") if not one.startswith(("unix:", "127.", "[::1]"))]
    return ",".join(found)


def _describe_threads(threads: Mapping[str, str], size: int, cores: int) -> str:
    name, count = next(iter(threads.items()))
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    usable = "1 usable core" if cores == 1 else f"{cores} usable cores"
    return f"{ranks} on {usable}: {name}={count} for each (set it yourself to change that)"


def _input_is_lost() -> bool:
    """Returns whether input for hvdrun would be lost: a non-empty file, or a pipe with data in it."""
    kind = os.fstat(0)
    if stat.S_ISREG(kind.st_mode):
        return kind.st_size > 0
    if not stat.S_ISFIFO(kind.st_mode):
        return False
    return struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, b"\0" * 4))[0] > 0
