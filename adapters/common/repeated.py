"""Operations in place on one tensor that a program makes over and over, such as once a step.

Their requests are described once and kept; after that only the tensor's address is written into them. That
takes a third of the time that describing and finding them anew does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from sirtaki._core.context import Context
from sirtaki._core.request import Batch

# By whatever tells one operation from another, those used last at the end. A batch is taken out while it
# runs, so that no two threads use it; taking one out and putting it back are atomic.
_kept: dict[Hashable, Batch] = {}
_MOST_KEPT = 256  # about 1 KiB each


def run_again(context: Context, key: Hashable, address: int, tensor: Any) -> bool:
    """Runs the operation that was kept under this key, on the tensor at this address.

    Returns:
        False if there is none, or another thread is running it: then nothing has happened.

    Raises:
        HorovodInternalError: the operation failed.
    """
    batch = _kept.pop(key, None)
    if batch is None:
        return False
    batch.point(0, address, address)
    batch.keep[0] = tensor
    context.run(batch)
    context.release(batch)
    batch.context = None
    _kept[key] = batch
    return True


def keep_described(key: Hashable, describe: Callable[[Batch], object]) -> None:
    """Describes an operation that has just worked, for the calls that will repeat it."""
    batch = Batch(1)
    describe(batch)
    if len(_kept) >= _MOST_KEPT:
        _kept.pop(next(iter(_kept), None), None)
    _kept[key] = batch
