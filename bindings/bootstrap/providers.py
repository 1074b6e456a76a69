"""Where this process stands in its world: the first provider that fits says so."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .._version import VERSION
from .handshake import BootstrapError, Job
from .key import KEY_BYTES, read_key

DEFAULT_START_TIMEOUT = 120.0  # seconds from the first rank's init()
_EXPLICIT_JOB = "explicit"  # the id of a job without a launcher, unless SIRTAKI_JOB gives one


@dataclass(frozen=True)
class World:
    """A rank's place, and how it reaches the others.

    Attributes:
        rank: this process's number, from 0.
        job: what all ranks have in common, the size among it.
        address: of the rendezvous; "" for a rank that is alone.
        start_timeout: seconds to wait for the other ranks.
        serves: there is no launcher, and this rank serves the rendezvous.
    """

    rank: int
    job: Job
    address: str = ""
    start_timeout: float = DEFAULT_START_TIMEOUT
    serves: bool = False


def alone() -> World:
    """A world of one."""
    return World(0, Job("", 1, b"", VERSION))


def find_world(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    key: bytes | str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> World:
    """The world of this process: that of the arguments, else hvdrun's, else a world of one.

    Raises:
        ValueError: arguments that are incomplete or contradict each other.
        BootstrapError: an environment that does.
    """
    if any(argument is not None for argument in (rank, size, address, key)):
        return _explicit(rank, size, address, key, environment)
    if "SIRTAKI_RANK" in environment:
        return _launched(environment)
    return alone()


def _explicit(
    rank: int | None,
    size: int | None,
    address: str | None,
    key: bytes | str | None,
    environment: Mapping[str, str],
) -> World:
    if rank is None or size is None:
        raise ValueError(
            "init() takes rank and size together: rank counts from 0, size is the number of processes"
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} and size is {size}, but ranks go from 0 to size - 1")
    if size == 1:
        return alone()
    if address is None:
        raise ValueError("init() needs the address of rank 0 as well, for example address='127.0.0.1:29500'")
    secret = _checked_key(key) if key is not None else _key_of(environment)
    job = Job(environment.get("SIRTAKI_JOB", _EXPLICIT_JOB), size, secret, VERSION)
    return World(rank, job, address, _start_timeout(environment), serves=rank == 0)


def _launched(environment: Mapping[str, str]) -> World:
    try:
        rank, size = int(environment["SIRTAKI_RANK"]), int(environment["SIRTAKI_SIZE"])
        address, job_id = environment["SIRTAKI_RENDEZVOUS"], environment["SIRTAKI_JOB"]
    except KeyError as missing:
        raise BootstrapError(
            f"SIRTAKI_RANK is set but {missing.args[0]} is not: start the ranks with hvdrun, which sets both"
        ) from None
    except ValueError as error:
        raise BootstrapError(f"SIRTAKI_RANK and SIRTAKI_SIZE have to be numbers: {error}") from None
    return World(rank, Job(job_id, size, _key_of(environment), VERSION), address, _start_timeout(environment))


def _start_timeout(environment: Mapping[str, str]) -> float:
    value = environment.get("SIRTAKI_START_TIMEOUT", DEFAULT_START_TIMEOUT)
    try:
        return float(value)
    except ValueError:
        raise BootstrapError(
            f"SIRTAKI_START_TIMEOUT is {value!r}, but it has to be a number of seconds"
        ) from None


def _key_of(environment: Mapping[str, str]) -> bytes:
    """The job's key; without one it is b"", with which only this machine is served."""
    if path := environment.get("SIRTAKI_KEY_FILE"):
        return read_key(path)
    return _checked_key(environment["SIRTAKI_KEY"]) if "SIRTAKI_KEY" in environment else b""


def _checked_key(key: bytes | str) -> bytes:
    try:
        secret = bytes.fromhex(key) if isinstance(key, str) else key
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise BootstrapError(
            f"the job's key has to be {KEY_BYTES} bytes, or {2 * KEY_BYTES} hexadecimal digits, for example "
            "from python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return secret
