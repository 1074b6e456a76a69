"""Recognises this machine among the hosts that a user or a script names.

`python -m sirtaki.runner.hosts.own_host` does so in a process of its own: it reads names, one a line, and
prints "1 name" for each that means this machine, and "0 name" for others, in any order. It leaves out a name
about which no name server answers.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from sirtaki.bindings.bootstrap.connection.address import is_own_address
from sirtaki.runner.launch.hosts import Host, is_this_host, merge_own

_LOOK_UPS = 16  # at a time: each may wait for a name server for seconds


def with_own_host(hosts: Sequence[Host]) -> list[Host]:
    """Returns the hosts with every name of this machine replaced by "localhost" and merged.

    Looks up names, which may take seconds for each.
    """
    return merge_own(hosts, _own_name_check(_has_own_address))


def _own_name_check(has_own_address: Callable[[str], bool]) -> Callable[[str], bool]:
    """Returns a function that returns whether a name means this machine."""
    own_names = (socket.gethostname(), socket.getfqdn())
    return lambda name: is_this_host(name, own_names, has_own_address)


def _has_own_address(name: str) -> bool:
    """Returns whether a name means an address of this machine."""
    try:
        return _finds_own_address(name)
    except OSError:
        return False


def _finds_own_address(name: str) -> bool:
    """As `_has_own_address`, but raises OSError if no name server answers."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except UnicodeError:
        return False
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise
        return False  # perhaps a name that only ssh knows
    return any(is_own_address(family, sockaddr) for family, _, _, _, sockaddr in found)


def _main() -> None:
    is_own = _own_name_check(_finds_own_address)
    with ThreadPoolExecutor(_LOOK_UPS) as pool:
        running = {pool.submit(is_own, name): name for name in sys.stdin.read().splitlines()}
        for done in as_completed(running):
            with contextlib.suppress(OSError):
                print(int(done.result()), running[done], flush=True)


if __name__ == "__main__":
    _main()
