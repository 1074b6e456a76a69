"""Calls of init() that Horovod allows: with a list of all ranks, and repeated with equivalent arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sirtaki.bindings.default_context import current
from sirtaki.common.process_sets import ProcessSet


def is_list_of_ranks(comm: Any) -> bool:
    """Returns whether the argument `comm` lists ranks; otherwise it is a communicator of MPI."""
    return isinstance(comm, list | tuple | range) and all(isinstance(one, int) for one in comm)


def require_all_ranks(comm: Sequence[int]) -> None:
    """Raises ValueError if a list of ranks leaves some of them out."""
    count = current().size
    if sorted(comm) != list(range(count)):
        raise ValueError(
            f"init(comm={list(comm)!r}) does not list all {count} ranks, of which a world consists: "
            "add a process set of some ranks, init(process_sets=[[...]]), or start fewer ranks"
        )


def compatible(arguments: Mapping[str, Any], process_sets: Sequence[Any]) -> dict[str, Any]:
    """Returns the arguments of a repeated init() without those that this world fulfils already.

    Raises:
        ValueError: a list of ranks that leaves some of them out.
    """
    rest = dict(arguments)
    comm: Any = rest.get("comm")
    if is_list_of_ranks(comm):
        require_all_ranks(comm)
        rest["comm"] = None
    elif hasattr(comm, "Get_size") and comm.Get_size() == current().size:
        rest["comm"] = None
    if all(
        isinstance(process_set, ProcessSet) and process_set.process_set_id is not None
        for process_set in process_sets
    ):
        rest["process_sets"] = None
    return rest
