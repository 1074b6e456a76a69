"""A job, its ranks, and the sides of a connection between two of them; the errors of the rendezvous."""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

RENDEZVOUS_RANK = -1  # the rank number that the rendezvous uses for itself
COLLECTOR_RANK = -2  # that of a host's collector, towards the rendezvous
DEBUGGED = "SIRTAKI_DEBUGGED"  # "rank:port": that rank waits in init() for a debugger at this port
CALLS = 1  # the channel of the connection over which a rank asks the launcher
# Signal of hvdrun to ranks that can stop, instead of SIGTERM. It reaches the group of a rank's process, in
# which processes without a handler, such as the workers of a DataLoader, ignore this signal.
ASK_TO_STOP = signal.SIGURG
STOPPED = 128 + signal.SIGTERM  # the exit code of a rank, or a job, that has stopped when it was asked


def name_ranks(ranks: Sequence[int]) -> str:
    """Formats "rank 1", "ranks 1 and 3", "ranks 1, 2, 3, 4, 5, 6, 7 and 60 more"."""
    return f"rank{'s' * (len(ranks) > 1)} {join_names(map(str, ranks), limit=8)}"


def join_names(names: Iterable[str], limit: int = 4) -> str:
    """Formats "a", "a and b", "a, b, c and 5 more"."""
    named = list(names)
    if len(named) > limit:
        named[limit - 1 :] = [f"{len(named) - limit + 1} more"]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


class RendezvousError(RuntimeError):
    """The ranks of a job could not reach or authenticate each other.

    `culprit` is the rank at fault, if that is known and not the rank that raises.
    """

    def __init__(self, text: str = "", culprit: int | None = None) -> None:
        super().__init__(text)
        self.culprit = culprit


class RendezvousTimeout(RendezvousError):
    """The peer did not connect, or did not answer, in time."""


class HandshakeError(RendezvousError):
    """The peer is not the expected process."""


class Role(enum.IntEnum):
    """The side of a connection that a process is on."""

    CONNECTS = 1
    ACCEPTS = 2


class LinkKind(enum.IntEnum):
    """The purpose of a connection."""

    RENDEZVOUS = 1  # a rank and the rendezvous
    PEERS = 2  # two ranks


@dataclass(frozen=True)
class Job:
    """The properties that all ranks of a job share."""

    id: str  # random, not secret
    size: int
    key: bytes = field(repr=False)  # secret; empty without authentication
    version: str  # of sirtaki, in this process
    encrypt: bool = False  # whether connections between hosts are encrypted
    through_store: bool = False  # the key passed through a store that others may read: only Unix sockets


@dataclass(frozen=True)
class Identity:
    """The identity of a side of a connection.

    Its rank, its generation (the number of init() calls in its process), its channel (which of several
    connections between the same processes), and the fingerprint of the certificate with which it encrypts
    this connection, b"" if it does not.
    """

    rank: int
    generation: int = 0
    channel: int = 0
    certificate: bytes = b""

    @property
    def name(self) -> str:
        names = {RENDEZVOUS_RANK: "the rendezvous", COLLECTOR_RANK: "the collector of a host"}
        return names.get(self.rank, f"rank {self.rank}")


# ---- Jobs beside that of the ranks, and the variables by which hvdrun describes them to its processes --


# The number of servers, the address of their rendezvous, the number of a server, and the number of ranks.
SERVERS, TABLES, SERVER, SIZE = "SIRTAKI_SERVERS", "SIRTAKI_TABLES", "SIRTAKI_SERVER", "SIRTAKI_SIZE"
END = 0  # sent to a server in the place of a table's number: the ranks have ended
# The number of a worker of an elastic job, and the address of its rendezvous with the arbiter.
WORKER, ARBITER = "SIRTAKI_WORKER", "SIRTAKI_ARBITER"
_WORKERS = 1_000_000  # the size of that rendezvous: no job uses more numbers of workers


def job_of_tables(job: Job, servers: int) -> Job:
    """Returns the job in which the ranks of `job`, followed by its servers, share tables."""
    return replace(job, id=f"{job.id}-tables", size=job.size + servers)


def job_of_workers(job: Job) -> Job:
    """Returns the job in which the workers of an elastic job have a rendezvous with the arbiter."""
    return replace(job, id=f"{job.id}.workers", size=_WORKERS)


# ---- The job's key: 32 random bytes, as hex in a file that only its owner may read. It is never shown --


KEY_BYTES = 32
KEY_ADVICE = (
    "write one with `python -c 'import secrets; print(secrets.token_hex(32))' > key && chmod 600 key` and "
    "set SIRTAKI_KEY_FILE=key for every rank"
)


def write_key(path: str, key: bytes | None = None) -> bytes:
    """Writes a key, by default a new key, to a new file at `path` (mode 0600), and returns the key."""
    key = key or os.urandom(KEY_BYTES)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key.hex() + "\n")
    return key


def parse_key(text: str) -> bytes:
    """Converts hexadecimal digits to bytes; b"" if these are none."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def read_key(path: str) -> bytes:
    """Reads the key in the file at `path`. Raises RendezvousError if it is missing or not well protected."""
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            text = file.read(4 * KEY_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise RendezvousError(f"cannot read the job's key from {path} (SIRTAKI_KEY_FILE): {error}") from None
    if status.st_uid not in (os.getuid(), 0):
        raise RendezvousError(
            f"the job's key in {path} belongs to user {status.st_uid}, not to you: "
            "copy it to a file of your own"
        )
    if status.st_mode & 0o077:
        raise RendezvousError(f"others may read or write the job's key in {path}: run `chmod 600 {path}`")
    key = parse_key(text)
    if len(key) != KEY_BYTES:
        raise RendezvousError(
            f"{path} holds no key: it must be {KEY_BYTES} bytes, written as {2 * KEY_BYTES} hex digits"
        )
    return key
