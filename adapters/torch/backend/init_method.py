"""The init method `sirtaki://`: the ranks that hvdrun has started become the default group.

hvdrun sets none of torch's variables, because trainers that find them would average gradients a second time.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import FileStore

from sirtaki.bindings.default_context import current
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.basics import init

_KEY_FILE = "SIRTAKI_KEY_FILE"  # in the job's private folder, which hvdrun removes at the end


def rendezvous(timeout: timedelta) -> tuple[FileStore, int, int]:
    """Makes this process a rank, as `hvd.init()` does; returns a store of all ranks, the rank and the size.

    Raises:
        UnsupportedError: hvdrun has not started this process, or the ranks are on several hosts.
        DeadlineError, InitializationError: the ranks could not form a world.
    """
    if "SIRTAKI_LAUNCHER" not in os.environ or not os.environ.get(_KEY_FILE):
        raise UnsupportedError(
            "the init method sirtaki:// is for ranks that hvdrun has started: under another launcher, leave "
            "out init_method, or pass a store"
        )
    init()
    context = current()
    if len({peer.host_index for peer in context.topology.peers}) > 1:
        raise UnsupportedError(
            "the init method sirtaki:// serves the ranks of one host: over several hosts, pass "
            "init_method='tcp://HOST:PORT' with an address of rank 0, and the rank and world_size of hvd"
        )
    name = f"c10d.{context.next_number('store of a process group')}"
    store = FileStore(os.path.join(os.path.dirname(os.environ[_KEY_FILE]), name), context.size)
    store.set_timeout(timeout)
    return store, context.rank, context.size
