"""Makes the name gloo mean sirtaki in torch.distributed, for programs and libraries that name gloo."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d as c10d


def mean_sirtaki_by_gloo() -> None:
    """Makes torch.distributed create a group of sirtaki wherever it would create a group of gloo.

    Such a group serves tensors on all devices. `get_backend` still returns "gloo", because libraries choose
    by that name. Where the default group belongs to another backend, as NCCL, gloo remains gloo.
    """
    make_group: Callable[..., Any] = c10d._new_process_group_helper
    signature = inspect.signature(make_group)

    @functools.wraps(make_group)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        is_default = not call.arguments["global_ranks_in_group"]
        name = str(call.arguments["backend"] or c10d.Backend.UNDEFINED)
        if not _names_gloo(name) or not (is_default or _is_of_sirtaki(c10d._get_default_group())):
            return make_group(*args, **kwargs)
        call.arguments["backend"] = c10d.Backend("sirtaki")
        group, store = make_group(*call.args, **call.kwargs)
        if _is_of_sirtaki(group):
            c10d._world.pg_map[group] = (c10d.Backend.GLOO, store)
        if is_default and call.arguments["group_rank"] == 0:
            sys.stderr.write('sirtaki: in torch.distributed, "gloo" means sirtaki (SIRTAKI_AS=gloo)\n')
        return group, store

    c10d._new_process_group_helper = make


def _names_gloo(backend: str) -> bool:
    """Returns whether torch would use gloo for tensors on the CPU."""
    return c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().get("cpu") == c10d.Backend.GLOO


def _is_of_sirtaki(group: Any) -> bool:
    return isinstance(group, c10d.ProcessGroup) and group.name() == "sirtaki"
