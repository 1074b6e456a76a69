"""Ranks described by sirtaki's own variables, which hvdrun sets, or any launcher that can set three of them.

hvdrun serves the rendezvous itself, and announces this in SIRTAKI_LAUNCHER. Otherwise rank 0 serves it at
SIRTAKI_RENDEZVOUS, and the rank may also be the index of a pod of an indexed Kubernetes job
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from sirtaki.runner.rendezvous.address import split_addresses
from sirtaki.runner.rendezvous.job import Job, RendezvousError
from sirtaki.runner.rendezvous.key import read_key
from sirtaki.runner.rendezvous.providers.world import (
    VERSION,
    World,
    key_of,
    number_in,
    served_by_rank_0,
    start_timeout,
)

_POD = "JOB_COMPLETION_INDEX"


def find(environment: Mapping[str, str]) -> World | None:
    """Returns the world that the variables describe; None if none of them is set."""
    if not any(name in environment for name in ("SIRTAKI_RANK", "SIRTAKI_SIZE", "SIRTAKI_RENDEZVOUS")):
        return None
    rank = "SIRTAKI_RANK" if "SIRTAKI_RANK" in environment or _POD not in environment else _POD
    for name in (rank, "SIRTAKI_SIZE", "SIRTAKI_RENDEZVOUS"):
        if name not in environment:
            raise RendezvousError(
                f"{name} is not set: start the ranks with hvdrun, or set SIRTAKI_RANK, SIRTAKI_SIZE and "
                "SIRTAKI_RENDEZVOUS (host:port, where rank 0 listens) for each"
            )
    number, size, address = number_in(environment, rank), number_in(environment, "SIRTAKI_SIZE"), ""
    try:
        address = ",".join(split_addresses(environment["SIRTAKI_RENDEZVOUS"]))
    except ValueError as error:
        raise RendezvousError(f"SIRTAKI_RENDEZVOUS: {error}") from None
    if "SIRTAKI_LAUNCHER" not in environment:
        return served_by_rank_0(number, size, address, "environment", environment)
    if "SIRTAKI_JOB" not in environment:
        raise RendezvousError("SIRTAKI_JOB is not set, which hvdrun sets: start the ranks with hvdrun")
    key_file = environment.get("SIRTAKI_KEY_FILE", "")
    key = key_of_launcher(key_file) if key_file else key_of(environment)
    job = Job(environment["SIRTAKI_JOB"], size, key, VERSION)
    return World(number, job, address, start_timeout(environment), folder=os.path.dirname(key_file))


@functools.lru_cache(maxsize=1)
def key_of_launcher(path: str) -> bytes:
    """Returns hvdrun's key, read once: a system that cleans temporary files may remove it after days."""
    return read_key(path)


def lone_rank_warning(environment: Mapping[str, str]) -> str:
    """Returns a warning if this process trains alone although several seem to have started; else ""."""
    if environment.get(_POD, "0") != "0":
        return (
            f"this is pod {environment[_POD]} of an indexed Kubernetes job, but it trains alone: set "
            "SIRTAKI_SIZE and SIRTAKI_RENDEZVOUS so that the pods train together"
        )
    return ""
