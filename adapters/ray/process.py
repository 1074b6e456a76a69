"""This process as a rank of Ray's: its world, and the rendezvous if it serves the rendezvous."""

from __future__ import annotations

from dataclasses import dataclass

from sirtaki.bindings.bootstrap import lifecycle
from sirtaki.bindings.bootstrap.connection.address import host_identity
from sirtaki.bindings.bootstrap.providers import world
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.runner.engines.places import EngineJob


@dataclass
class _State:
    server: RendezvousServer | None = None


_state = _State()


def find_host() -> str:
    """Returns the identity of this process's host."""
    return host_identity()


def serve(job: EngineJob) -> str:
    """Serves the rendezvous of a job until `leave`; returns its address."""
    leave()
    _state.server = job.serve()
    return _state.server.address


def enter(job: EngineJob, rank: int, address: str) -> None:
    """Makes `init()` in this process that of a rank of the job."""
    lifecycle.forget()
    world.assign(job.world(rank, address))


def leave() -> None:
    """Ends this process's part in its job. A second call does nothing."""
    lifecycle.forget()
    world.assign(None)
    if _state.server is not None:
        _state.server.close()
        _state.server = None
