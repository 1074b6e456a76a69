"""The process groups of the backend, and how torch.distributed creates them."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed import Reducer, Work

from sirtaki.bindings.context import Context, find
from sirtaki.bindings.errors import NotInitializedError, UnsupportedError
from sirtaki.common.shared_world import SharedWorld
from sirtaki.torch.backend.messages import Messages
from sirtaki.torch.backend.moving import Moving, Reducing
from sirtaki.torch.backend.submission import Submission
from sirtaki.torch.backend.work import CoalescedWork

# With older versions some waits for works that are written in Python never end: those of functional
# collectives (and so of DTensor) up to 2.6, those of pipelines with 2.7.
_OLDEST_TORCH, _TESTED = "2.8", "2.8, 2.13 and 2.15"


class SirtakiGroup(Reducing, Moving, Messages):
    """A process group of torch.distributed that runs its operations in sirtaki's core."""

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, context: Context, members: list[int], options: Any) -> None:
        super().__init__(context, members, options.timeout, options.store)
        self.world: SharedWorld | None = None  # of the default group
        self._name, self._description = str(options.group_id), "undefined"

    # torch calls these by the names of their C++ functions.
    def getBackendName(self) -> str:  # noqa: N802
        """Returns "sirtaki"."""
        return "sirtaki"

    def getGroupName(self) -> str:  # noqa: N802
        """Returns the name by which torch finds the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Sets the name by which torch finds the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Returns the user's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Sets the user's description of the group."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        """Returns the device types that the group supports: torch's checkpoints choose by them."""
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device: torch.device) -> Any:
        """Returns the group itself, which serves all devices."""
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        """Collects the works of the following calls."""
        self.collected = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """Returns a single work for all works since `_start_coalescing`."""
        works, self.collected = self.collected, None
        return CoalescedWork(works or [])

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Raises UnsupportedError: torch's own method would crash without a backend in C++."""
        raise UnsupportedError("the process group backend sirtaki splits no groups: use new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        """Raises UnsupportedError, where torch's own method would return None."""
        raise UnsupportedError("the process group backend sirtaki merges no groups: use new_group")

    def shutdown(self) -> None:
        """Ends the use of the world by the default group."""
        if self.world is not None:
            self.world.leave()
            self.world = None

    def abort(self) -> None:
        """Ends the world: every operation in flight fails, on all ranks."""
        self.context.abort(f"rank {self.context.rank} aborted the process group {self._name!r}")


def _keep_works_of_reducers() -> None:
    """Makes DDP's reducer keep the work of `join` that counts the ranks, until the next work.

    The reducer waits for it in C++, which never ends once nobody in Python holds the work.
    """
    reducers: Any = Reducer
    set_work = reducers._set_forward_pass_work_handle
    works: weakref.WeakKeyDictionary[Any, Work] = weakref.WeakKeyDictionary()

    @functools.wraps(set_work)
    def set_and_keep(reducer: Any, work: Work, use_static_world_size: bool) -> None:
        works[reducer] = work
        set_work(reducer, work, use_static_world_size)

    reducers._set_forward_pass_work_handle = set_and_keep


_keep_works_of_reducers()


def create(options: Any, backend_options: Any = None) -> Submission:
    """Returns a new process group; torch.distributed calls it on the members of the group.

    Raises:
        UnsupportedError: options or a version of torch that are not supported.
        DeadlineError, InitializationError: the ranks could not form a world.
    """
    if torch.__version__ < _OLDEST_TORCH:
        raise UnsupportedError(
            f"the process group backend sirtaki needs torch {_OLDEST_TORCH} or newer (tested with "
            f"{_TESTED}), but this is torch {torch.__version__}: update it, or use Horovod's calls"
        )
    if backend_options is not None:
        raise UnsupportedError("the process group backend sirtaki takes no pg_options")
    rank, size = options.group_rank, options.group_size
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        world = SharedWorld(options.store, rank, size)
        group = SirtakiGroup(world.context, list(range(size)), options)
        group.world = world
        return group
    context = find()
    if context is None:
        raise NotInitializedError("the default process group has to be one of the backend sirtaki")
    return SirtakiGroup(context, ranks, options)
