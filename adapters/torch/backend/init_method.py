"""The init method `sirtaki://`: the ranks that hvdrun has started become the default group.

It needs none of torch's variables. hvdrun sets those with --torch-env only, because trainers that find them
would average gradients again that Horovod's calls have averaged.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore

from sirtaki.bindings.default_context import current
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.basics import init
from sirtaki.torch.backend.shared_store import store_of_all_ranks

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
