"""Recognises this machine among the hosts that a user or a script names.

`python -m sirtaki.runner.own_host` does so in a process of its own: it reads names, one a line, and prints
"1 name" for each that means this machine, and "0 name" for others, in any order.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from sirtaki.runner.hosts import Host, is_this_host, merge_own
from sirtaki.runner.rendezvous.interfaces import is_own_address

_LOOK_UPS = 16  # at a time: each may wait for a name server for seconds


def with_own_host(hosts: Sequence[Host]) -> list[Host]:
    """Returns the hosts with every name of this machine replaced by "localhost" and merged.

    Looks up names, which may take seconds for each.
    """
    return merge_own(hosts, _own_name_check())


def _own_name_check() -> Callable[[str], bool]:
    """Returns a function that returns whether a name means this machine."""
    own_names = (socket.gethostname(), socket.getfqdn())
    return lambda name: is_this_host(name, own_names, _has_own_address)


def _has_own_address(name: str) -> bool:
    """Returns whether a name means an address of this machine."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # perhaps a name that only ssh knows
        return False
    return any(is_own_address(family, sockaddr) for family, _, _, _, sockaddr in found)


def _main() -> None:
    is_own = _own_name_check()
    with ThreadPoolExecutor(_LOOK_UPS) as pool:
        running = {pool.submit(is_own, name): name for name in sys.stdin.read().splitlines()}
        for done in as_completed(running):
            print(int(done.result()), running[done], flush=True)


if __name__ == "__main__":
    _main()
