"""Ranks that srun has started (https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES).

Slurm provides no channel to the tasks of a step, so the port is computed from the job's number.
"""

from __future__ import annotations

from collections.abc import Mapping

from sirtaki.runner.rendezvous.address import join_address
from sirtaki.runner.rendezvous.job import RendezvousError
from sirtaki.runner.rendezvous.node_list import node_names
from sirtaki.runner.rendezvous.providers.world import World, number_in, served_by_rank_0

_FIRST_PORT, _PORTS = 15_000, 15_000  # below the ports that systems assign by themselves


def find(environment: Mapping[str, str]) -> World | None:
    """Returns the world of a job step; None outside of one (in a batch script itself, for example)."""
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1" or "SLURM_PROCID" not in environment:
        return None
    rank, size = number_in(environment, "SLURM_PROCID"), number_in(environment, "SLURM_STEP_NUM_TASKS")
    job, step = number_in(environment, "SLURM_JOB_ID"), number_in(environment, "SLURM_STEP_ID")
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    port = number_in(environment, "SIRTAKI_PORT") if "SIRTAKI_PORT" in environment else port_of(job, step)
    return served_by_rank_0(
        rank, size, join_address(first_node(nodes), port), f"slurm-{job}.{step}", environment
    )


def port_of(job: int, step: int) -> int:
    """Returns the port at which rank 0 of a job step listens, unless SIRTAKI_PORT overrides it."""
    return _FIRST_PORT + (job * 16 + step) % _PORTS


def first_node(nodes: str) -> str:
    """Returns the first host of a list in Slurm's notation: gpu07 for "gpu[07-09,12],cpu1"."""
    try:
        return next(node_names(nodes))
    except ValueError as error:
        raise RendezvousError(f"Slurm's variables cannot be used: {error}") from None
