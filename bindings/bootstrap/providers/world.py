"""A provider's result: a rank's position in its world, and how it reaches the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.address import is_abstract
from sirtaki.bindings.bootstrap.job import KEY_ADVICE, KEY_BYTES, Job, RendezvousError, parse_key, read_key

NOT_OF_RANK_0 = (
    "the store through which the ranks meet holds a value that rank 0 did not write: another process can "
    f"write to it. To authenticate the ranks without it, {KEY_ADVICE}"
)
DEFAULT_START_TIMEOUT = 120.0  # seconds from the first rank's init()


@dataclass(frozen=True)
class World:
    """A rank's position, and how it reaches the other ranks.

    Attributes:
        rank: this process's number, from 0.
        job: the properties that all ranks share, including the size.
        address: of the rendezvous; if there are several, separated by commas, any of them works. "" for a
            world of one.
        start_timeout: seconds to wait for the other ranks.
        serves: whether this rank serves the rendezvous, at `address`, because no launcher does.
        announce: where a launcher has a channel of its own, all ranks call this: the serving rank with its
            address; it returns that address to the others.
        folder: a folder on this host, private to the job, if its launcher has made one; else "".
        on_no_link: if this rank cannot link to the others, it is called with the addresses of those on other
            hosts that it had to connect to, by rank.
        communicator: mpi4py's, of these ranks in this order, if MPI knows them.
    """

    rank: int
    job: Job
    address: str = ""
    start_timeout: float = DEFAULT_START_TIMEOUT
    serves: bool = False
    announce: Callable[[str], str] | None = None
    folder: str = ""
    on_no_link: Callable[[Mapping[int, Sequence[str]]], None] | None = None
    communicator: Any = None


def single_rank_world() -> World:
    """Returns a world of a single rank."""
    return World(0, Job("", 1, b"", VERSION))


def served_by_rank_0(rank: int, size: int, address: str, job: str, environment: Mapping[str, str]) -> World:
    """Returns a world in which rank 0 serves the rendezvous at an address that all ranks know beforehand."""
    if not 0 <= rank < size:
        raise RendezvousError(f"rank is {rank} and size is {size}, but ranks go from 0 to size - 1")
    if size == 1:
        return single_rank_world()
    described = Job(environment.get("SIRTAKI_JOB", job), size, key_of(environment), VERSION)
    return World(rank, described, address, start_timeout(environment), serves=rank == 0)


def number_in(environment: Mapping[str, str], name: str) -> int:
    """Returns a numeric variable. Raises RendezvousError if it is missing, or not a number."""
    try:
        return int(environment[name])
    except KeyError:
        raise RendezvousError(f"the environment variable {name} is missing") from None
    except ValueError:
        raise RendezvousError(f"{name} is {environment[name]!r}, but it has to be a number") from None


def start_timeout(environment: Mapping[str, str]) -> float:
    """Returns how many seconds init() waits for the other ranks."""
    value = environment.get("SIRTAKI_START_TIMEOUT", DEFAULT_START_TIMEOUT)
    try:
        return float(value)
    except ValueError:
        raise RendezvousError(
            f"SIRTAKI_START_TIMEOUT is {value!r}, but it has to be a number of seconds"
        ) from None


def key_from_store(text: str) -> bytes:
    """Returns the key that rank 0 has written to a store. Raises RendezvousError if that is no key."""
    key = parse_key(text)
    if len(key) != KEY_BYTES:
        raise RendezvousError(NOT_OF_RANK_0)
    return key


def local_address(address: str) -> str:
    """Returns an address that came from a store, if only a process of this host can listen there.

    Raises RendezvousError for any other address: whoever can write to the store may have written it, with
    another key.
    """
    if not all(map(is_abstract, address.split(","))):
        raise RendezvousError(NOT_OF_RANK_0)
    return address


def key_of(environment: Mapping[str, str]) -> bytes:
    """Returns the job's key; b"" if there is none, and then only ranks of this machine can connect."""
    if path := environment.get("SIRTAKI_KEY_FILE"):
        return read_key(path)
    return checked_key(environment["SIRTAKI_KEY"]) if "SIRTAKI_KEY" in environment else b""


def checked_key(key: bytes | str) -> bytes:
    """Converts a user's key to bytes. Raises RendezvousError if it is not a valid key."""
    secret = parse_key(key) if isinstance(key, str) else key
    if len(secret) != KEY_BYTES:
        raise RendezvousError(
            f"the job's key has to be {KEY_BYTES} bytes, or {2 * KEY_BYTES} hexadecimal digits, for example "
            "from python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return secret


# ---- The world that an engine, such as Spark or Ray, has assigned to this process ----------------------
# An engine calls functions in its own processes, so that nothing travels through their environment:
# programs that they start would inherit it, and the key with it.


@dataclass
class _State:
    world: World | None = None


_state = _State()


def find_assigned(environment: Mapping[str, str]) -> World | None:
    """Returns the world of this process; None if no engine has assigned a world. Ignores the environment."""
    return _state.world


def assign(world: World | None) -> None:
    """Assigns a world to this process until the next call; None: it has none any more."""
    _state.world = world
