"""Who the ranks are: what each says of itself in the first all-gather, and whether that fits together."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..context import Peer, Topology
from .handshake import BootstrapError, printable


@dataclass(frozen=True)
class Member:
    """What a rank says of itself.

    Attributes:
        host: which host it is on, in a form that only equals itself (boot and network namespace).
        hostname: what people call the host.
        pid: its process number there.
        listens_at: name of its abstract Unix socket.
        settings: its values of the settings that must be alike.
        no_memory: why it cannot make shared memory; "" if it can or need not.
    """

    host: str
    hostname: str
    pid: int
    listens_at: str
    settings: Mapping[str, str]
    no_memory: str

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def unpack(payload: bytes) -> Member:
    """A member as it came from its (authenticated) process; BootstrapError if it makes no sense."""
    try:
        values = json.loads(payload)
        member = Member(**{field.name: values[field.name] for field in fields(Member)})
        settings = {str(name): printable(str(value), 200) for name, value in dict(member.settings).items()}
        return Member(
            str(member.host),
            printable(str(member.hostname), 100),
            int(member.pid),
            str(member.listens_at),
            settings,
            printable(str(member.no_memory), 500),
        )
    except (ValueError, TypeError, KeyError):
        raise BootstrapError("a rank introduced itself in a way that makes no sense") from None


def host_identity() -> str:
    """This host: the boot of the machine, and the network namespace, in which abstract sockets are known."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def introduce(listens_at: str, settings: Mapping[str, str], no_memory: str) -> Member:
    """This process as a member."""
    return Member(host_identity(), socket.gethostname(), os.getpid(), listens_at, settings, no_memory)


def check_agreement(members: Sequence[Member]) -> None:
    """Raises BootstrapError, with both values, if ranks differ in what must be alike."""
    first = members[0]
    for rank, member in enumerate(members):
        if member.host != first.host:
            raise BootstrapError(
                f"rank 0 is on host {first.hostname}, rank {rank} on {member.hostname} (or in another "
                "network namespace of it): this version serves one host, so start all ranks on one"
            )
        for name in sorted(first.settings.keys() | member.settings.keys()):
            ours, theirs = first.settings.get(name), member.settings.get(name)
            if ours != theirs:
                variable = f"SIRTAKI_{name.upper()}"
                raise BootstrapError(
                    f"the setting {name} is {ours} on rank 0 and {theirs} on rank {rank}: "
                    f"set {variable} to one value for all ranks"
                )


def topology_of(rank: int, members: Sequence[Member]) -> Topology:
    """Where a rank stands, from where all of them run."""
    hosts = list(dict.fromkeys(member.host for member in members))
    ranks_of = {host: [r for r, member in enumerate(members) if member.host == host] for host in hosts}
    here = members[rank].host
    local_rank = ranks_of[here].index(rank)
    equals = [host for host in hosts if len(ranks_of[host]) > local_rank]
    peers = [Peer(member.hostname, member.pid, hosts.index(member.host)) for member in members]
    return Topology(
        rank, len(members), local_rank, len(ranks_of[here]), equals.index(here), len(equals), peers
    )
