"""In-place operations on a single tensor that a program repeats, such as once per step.

Their requests are described once and kept; after that only the tensor's address is written into them. That
takes a third of the time that a new description and look-up would take.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from sirtaki.bindings.context import Context
from sirtaki.bindings.request import Batch

# Keyed by everything that distinguishes operations, the most recently used at the end. A batch is taken out
# while it runs, so that no two threads use it; taking it out and putting it back are atomic.
_cache: dict[Hashable, Batch] = {}
_MAX_CACHED = 256  # about 1 KiB each


def run_repeated(context: Context, key: Hashable, address: int, tensor: Any) -> bool:
    """Runs the operation that was kept under this key, on the tensor at this address.

    Returns:
        False if there is none, or if another thread is running it: then nothing has happened.

    Raises:
        HorovodInternalError: the operation failed.
    """
    batch = _cache.pop(key, None)
    if batch is None:
        return False
    batch.set_buffers(0, address, address)
    batch.keepalive[0] = tensor
    context.run(batch)
    context.release(batch)
    batch.context = None
    _cache[key] = batch
    return True


def cache_described(key: Hashable, batch: Batch) -> None:
    """Keeps the description of an operation that has just succeeded, for the calls that repeat it."""
    while len(_cache) >= _MAX_CACHED:
        for oldest in list(_cache)[:1]:  # an atomic copy: other threads change the cache meanwhile
            _cache.pop(oldest, None)
    _cache[key] = batch
