"""Sets up a job: the guard, the key, the rendezvous and the ranks; then the supervisor takes over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import selectors
import stat
import struct
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sirtaki._core._version import VERSION
from sirtaki._core.bootstrap.handshake import Job
from sirtaki._core.bootstrap.key import write_key
from sirtaki._core.bootstrap.store_server import StoreServer

from .command import NOT_EXECUTABLE
from .culprit import Inquiry
from .display import Display
from .environment import RankEnvironment
from .epilogue import Epilogue
from .errors import LaunchError
from .guard import Guard
from .process import RankProcess
from .signals import Bell
from .supervisor import Mailbox, Supervisor
from .timeline import remove_timelines

REPORTS = "SIRTAKI_DUMP_DIRECTORY"


@dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    size: int
    command: Sequence[str]  # the path of a program, and its arguments
    start_timeout: float = 120.0  # seconds
    output_folder: Path | None = None
    verbose: bool = False
    additions: Mapping[str, str] = field(default_factory=dict)  # to the ranks' environment
    timeline: Path | None = None  # of all ranks
    notices: tuple[str, ...] = ()  # shown before anything else


def run_job(settings: Settings) -> int:
    """Runs a job to its end and returns hvdrun's exit code. Raises LaunchError if it cannot start."""
    with contextlib.closing(Bell()) as bell, Guard() as guard:
        return _run_job(settings, bell, guard)


def _run_job(settings: Settings, bell: Bell, guard: Guard) -> int:
    bell.hold_back()
    mailbox = Mailbox(bell)
    selector = selectors.PollSelector()  # epoll refuses regular files
    display = Display(settings.size, selector, settings.output_folder, settings.verbose)
    for notice in settings.notices:
        display.say(notice)
    key_file, key = _make_key(guard)
    job = Job(secrets.token_hex(8), settings.size, key, VERSION)
    server = StoreServer(f"unix:@sirtaki-{job.id}", job, settings.start_timeout, mailbox.put)
    epilogue = _make_epilogue(settings, Path(key_file).parent)
    additions = {**settings.additions, REPORTS: str(epilogue.reports)}
    environment = RankEnvironment(
        job.size, job.id, server.address, key_file, settings.start_timeout, additions
    )
    ranks = _start_ranks(settings.command, environment, guard)  # before there is a thread: it forks
    server.start()
    inquiry = Inquiry(settings.start_timeout)
    for rank in ranks:
        inquiry.note_start(rank.rank, rank.pid)
        display.add_rank(rank.rank, rank.stdout, rank.stderr)
        display.detail(f"rank {rank.rank} is pid {rank.pid}: {' '.join(settings.command)}")
    if _input_is_lost():
        display.say("standard input is not passed on: every rank reads /dev/null")
    supervisor = Supervisor(ranks, display, selector, inquiry, server, epilogue)
    return supervisor.run(bell, mailbox, guard)


def _start_ranks(command: Sequence[str], environment: RankEnvironment, guard: Guard) -> list[RankProcess]:
    ranks: list[RankProcess] = []
    for rank in range(environment.size):
        try:
            ranks.append(RankProcess(rank, command, environment.of(rank, os.environ), guard))
        except OSError as error:
            reason = f"cannot start rank {rank}: {command[0]}: {error.strerror}"
            if error.errno == errno.ENOEXEC:
                reason = f"{command[0]} is neither a program nor a script that begins with '#!'"
            raise LaunchError(reason, NOT_EXECUTABLE) from None
    return ranks


def _make_epilogue(settings: Settings, private: Path) -> Epilogue:
    """Ranks write what they did when a job fails where the user says, else into the job's own folder."""
    folder = settings.additions.get(REPORTS) or os.environ.get(REPORTS)
    if settings.timeline is not None:
        remove_timelines(settings.timeline)
    return Epilogue(settings.size, Path(folder or private).absolute(), bool(folder), settings.timeline)


def _make_key(guard: Guard) -> tuple[str, bytes]:
    """The job's key, and its file in a new folder that only this user may open and that the guard removes."""
    name = f"sirtaki-{secrets.token_hex(8)}"
    for parent in filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", os.getcwd())):
        path = os.path.join(os.path.abspath(parent), name)
        guard.watch_directory(path)
        with contextlib.suppress(OSError):
            os.mkdir(path, 0o700)
            key_file = os.path.join(path, "key")
            return key_file, write_key(key_file)
    raise LaunchError("there is no folder for temporary files: set TMPDIR to one that you may write to", 1)


def _input_is_lost() -> bool:
    """Whether somebody gave hvdrun something to read: a file that is not empty, or a pipe with data in it."""
    kind = os.fstat(0)
    if stat.S_ISREG(kind.st_mode):
        return kind.st_size > 0
    if not stat.S_ISFIFO(kind.st_mode):
        return False
    return struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, b"\0" * 4))[0] > 0
