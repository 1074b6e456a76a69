"""Ranks that Kubeflow Trainer has started, one in each pod, without torchrun.

Trainer describes the pods in PET_*, the variables of torchrun's options (torch.distributed.run); rank 0
listens at the address that is meant for torchrun's store.
"""

from __future__ import annotations

from collections.abc import Mapping

from sirtaki.runner.rendezvous.address import join_address
from sirtaki.runner.rendezvous.job import RendezvousError
from sirtaki.runner.rendezvous.providers.world import World, number_in, served_by_rank_0

_NAMES = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def find(environment: Mapping[str, str]) -> World | None:
    """Returns the world of a TrainJob's pods; None outside of one."""
    if not all(environment.get(name) for name in _NAMES):
        return None
    per_pod = environment.get("PET_NPROC_PER_NODE", "1")
    if per_pod.isdecimal() and per_pod != "1":
        raise RendezvousError(
            f"this TrainJob asks for {per_pod} processes in each pod, but its command has started one: let "
            "the command begin with torchrun instead of python, or set numProcPerNode to 1"
        )
    rank, size = number_in(environment, "PET_NODE_RANK"), number_in(environment, "PET_NNODES")
    address = join_address(environment["PET_MASTER_ADDR"], number_in(environment, "PET_MASTER_PORT"))
    return served_by_rank_0(rank, size, address, "kubeflow", environment)
