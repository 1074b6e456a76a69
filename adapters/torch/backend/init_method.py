"""The init method `sirtaki://`: the ranks that hvdrun has started become the default group.

It needs none of torch's variables. hvdrun sets those with --torch-env only, because trainers that find them
would average gradients again that Horovod's calls have averaged.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, TCPStore

from sirtaki.bindings.context import Context, current
from sirtaki.bindings.errors import InitializationError, UnsupportedError
from sirtaki.common.basics import init
from sirtaki.common.ops.objects import allgather_object, broadcast_object
from sirtaki.common.shared_world import own_addresses

_KEY_FILE = "SIRTAKI_KEY_FILE"  # in the job's private folder, which hvdrun removes at the end


def rendezvous(timeout: timedelta) -> tuple[Any, int, int]:
    """Makes this process a rank, as `hvd.init()` does; returns a store of all ranks, the rank and the size.

    Raises:
        UnsupportedError: hvdrun has not started this process.
        DeadlineError, InitializationError: the ranks could not form a world, or do not reach rank 0.
    """
    if "SIRTAKI_LAUNCHER" not in os.environ or not os.environ.get(_KEY_FILE):
        raise UnsupportedError(
            "the init method sirtaki:// is for ranks that hvdrun has started: under another launcher, leave "
            "out init_method, or pass a store"
        )
    init()
    context = current()
    number = context.next_number("store of a process group")
    if len({peer.host_index for peer in context.topology.peers}) > 1:
        return store_of_all_ranks(context, number, timeout), context.rank, context.size
    store = FileStore(os.path.join(os.path.dirname(os.environ[_KEY_FILE]), f"c10d.{number}"), context.size)
    store.set_timeout(timeout)
    return store, context.rank, context.size


# ---- The store of a process group whose ranks are on several hosts: torch's, served by rank 0 ----------
# Its port and its addresses travel through the core's broadcast, so that nobody has to choose them before
# the ranks start.


_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 5.0  # for each address; between hosts that reach each other it takes milliseconds
_ANSWER = timedelta(seconds=30)  # for a listener that may be another program


def store_of_all_ranks(context: Context, number: int, timeout: timedelta) -> Any:
    """Returns a store that all ranks share. All of them must call it, with the same number.

    Raises:
        InitializationError: some of the ranks do not reach rank 0; the text names them.
        HorovodInternalError: a rank was lost.
    """
    name, failure = f"c10d.store.{number}", ""
    if context.rank == 0:
        store, mark = _serve(timeout), f"sirtaki/{secrets.token_hex(16)}"
        store.set(mark, "")
        broadcast_object((own_addresses(), store.port, mark), 0, name=name)
    else:
        addresses, port, mark = broadcast_object(None, 0, name=name)
        store, failure = _connect(_candidates(context, addresses), port, mark)
    # Rank 0 must not end its group, and the store with it, before the others have connected.
    failures = allgather_object(failure, name=name)
    if any(failures):
        raise InitializationError(_describe(context, failures))
    store.set_timeout(timeout)
    return store


def _serve(timeout: timedelta) -> Any:
    return TCPStore(_LOOPBACK, 0, is_master=True, timeout=timeout, wait_for_workers=False)


def _candidates(context: Context, addresses: Sequence[str]) -> list[str]:
    """Returns the addresses at which this rank may reach rank 0."""
    peers = context.topology.peers
    if peers[context.rank].host_index == peers[0].host_index:
        return [_LOOPBACK]
    mine = own_addresses()  # a container's bridge has the same address on many hosts
    return [address for address in addresses if address not in mine]


def _connect(addresses: Sequence[str], port: int, mark: str) -> tuple[Any, str]:
    """Returns a connection to the store that has the mark and "", or None and why there is none."""
    failures = []
    for address in addresses:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()  # torch itself would retry
            store = TCPStore(address, port, is_master=False, timeout=_ANSWER)
            if store.check([mark]):
                return store, ""
            failures.append(f"{address} (another program listens there)")
        except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            failures.append(f"{address} ({str(error).splitlines()[0]})")
    return None, ", ".join(failures) or "rank 0 has no address that this host lacks"


def _describe(context: Context, failures: Sequence[str]) -> str:
    lost = [rank for rank, failure in enumerate(failures) if failure]
    peers = context.topology.peers
    which = ", ".join(f"rank {rank} on {peers[rank].host}" for rank in lost[:10])
    more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
    return (
        f"the store of the process group is on rank 0 ({peers[0].host}), which {which}{more} cannot reach: "
        f"{failures[lost[0]]}. Is there a firewall? SIRTAKI_NETWORK_INTERFACES selects the network to use"
    )
