"""Ranks that srun has started (https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES).

Slurm provides no channel to the tasks of a step, so the port is computed from the job's number.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from sirtaki.bindings.bootstrap.connection.address import join_address
from sirtaki.bindings.bootstrap.job import RendezvousError
from sirtaki.bindings.bootstrap.providers.world import World, number_in, served_by_rank_0

_FIRST_PORT, _PORTS = 15_000, 15_000  # below the ports that systems assign by themselves
_RANK, _SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
# The same numbers by MPI, whose launcher may itself have used srun to start one process on each node.
_BY_MPI = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def is_task(environment: Mapping[str, str]) -> bool:
    """Returns whether this process is a task of a step, rather than a child of a launcher that is a task."""
    own = (environment.get(_RANK), environment.get(_SIZE))
    by_mpi = [(environment[rank], environment.get(size)) for rank, size in _BY_MPI if rank in environment]
    return None not in own and all(pair == own for pair in by_mpi)


def find(environment: Mapping[str, str]) -> World | None:
    """Returns the world of a job step; None outside a step, for example in the batch script itself."""
    if environment.get(_SIZE, "1") == "1" or not is_task(environment):
        return None
    rank, size = number_in(environment, _RANK), number_in(environment, _SIZE)
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


# ---- Slurm's notation for lists of nodes (https://slurm.schedmd.com/scontrol.html, hostlist expressions)


_ENTRIES = re.compile(r",(?![^\[]*\])")  # commas outside of brackets
_PARTS = re.compile(r"\[([\d,-]+)\]|([^\[\],\s]+)", re.ASCII)


def node_names(text: str) -> Iterator[str]:
    """Yields gpu07, gpu08, gpu12 and cpu1 for "gpu[07-08,12],cpu1". Raises ValueError if it is malformed."""
    for entry in _ENTRIES.split(text):
        parts = list(_PARTS.finditer(entry))
        if entry != "".join(part.group() for part in parts) or not entry or entry.startswith("["):
            raise ValueError(f"the list of nodes {text!r} is malformed")
        choices = [list(_numbers(part[1])) if part[1] else [part[2]] for part in parts]
        yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    """Yields the numbers of "07-09,12", padded to the width of each range's first number."""
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or not (last.isdecimal() and int(first) <= int(last) if dash else True):
            raise ValueError(f"{part!r} is not a range of numbers of nodes")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"
