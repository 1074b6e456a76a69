"""The numbers of a script that a step changes: those that grow by the rows of a part are found in a proof."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from numbers import Real
from types import FrameType
from typing import Any

import torch

from sirtaki.common.shares import Share
from sirtaki.torch.auto import positions
from sirtaki.torch.auto.row_counts import RowCount

_DEEPEST = 4
_MOST = 1000  # elements of a container that are read
_CLOSE = 1e-9
Numbers = dict[str, float]


def numbers_of(frame: FrameType | None) -> Numbers:
    """Returns the numbers that a function of the script and those that have called it can reach."""
    found: Numbers = {}
    depth = 0
    while frame is not None:
        for name, value in list(frame.f_locals.items()):
            if not name.startswith("__"):
                found.update((f"{depth}:{path}", number) for path, number in _numbers(value, name, _DEEPEST))
        frame = positions.user_frame(frame.f_back) if frame.f_back else None
        depth += 1
    return found


def _numbers(value: Any, path: str, depth: int) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | torch.Tensor):
        return
    if isinstance(value, Real | RowCount):
        yield path, float(value)
    elif depth:
        for name, one in _elements(value):
            yield from _numbers(one, f"{path}{name}", depth - 1)


def _elements(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        for key, one in islice(list(value.items()), _MOST):
            yield f"[{key!r}]", one
    elif isinstance(value, list | tuple | deque):
        start = max(0, len(value) - _MOST)
        for index, one in enumerate(islice(value, start, None)):
            yield f"[{start + index}]", one
    elif not isinstance(value, torch.nn.Module | type) and _is_users(type(value)):
        for name, one in list(getattr(value, "__dict__", {}).items()):
            yield f".{name}", one


def _is_users(kind: type) -> bool:
    """Returns whether a class is one of the script's own."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not positions.is_library(file)


def miscounted(before: Numbers, whole: Numbers, part: Numbers, share: Share) -> str | None:
    """Returns which number has grown by the rows of a part, or by their reciprocal; None: none has."""
    if share.count in (0, share.total):
        return None
    for path, number in whole.items():
        start = before.get(path, 0.0)
        grown, other = number - start, part.get(path, math.nan) - start
        for factor in (share.count / share.total, share.total / share.count):
            if grown and math.isclose(other, grown * factor, rel_tol=_CLOSE):
                name = path.partition(":")[2]
                return (
                    f"{name} grows by {other:g} with the {share.count} rows of this rank, and by {grown:g} "
                    f"with the {share.total} of the whole batch: count rows by tensor.size(0), "
                    "tensor.shape[0] or len(tensor), which are the whole batch's in the function of the "
                    "loop"
                )
    return None
