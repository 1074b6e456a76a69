"""The hosts that a batch system has allocated to the job in which hvdrun runs: Slurm's, or LSF's.

They are read from variables alone: no program of the batch system is called, and none has to be installed.
(https://slurm.schedmd.com/sbatch.html, output environment variables; IBM Spectrum LSF, environment variables
for jobs.)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sirtaki.bindings.bootstrap.connection.node_list import node_names
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import Host, merge_hosts

IN_SLURM = "SLURM_JOB_ID"
_SPECIAL_STEPS = 0xFFFFFFF0  # from here on: the batch script, an interactive shell and others (slurm.h)
_COUNT = re.compile(r"(?P<tasks>\d+)(?:\(x(?P<nodes>\d+)\))?", re.ASCII)


@dataclass(frozen=True)
class Allocation:
    """The hosts of a job of a batch system, with the tasks that it has on each as slots."""

    name: str  # as a user calls it
    hosts: Sequence[Host]

    def text(self, ranks: int) -> str:
        """Returns the hosts as --hosts takes them. A lone host has room for all `ranks`: cores limit them."""
        hosts = self.hosts
        if len(hosts) == 1:
            hosts = [replace(hosts[0], slots=max(hosts[0].slots or 1, ranks))]
        return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Returns the batch allocation that this process runs in; None outside of an allocation.

    Raises LaunchError.
    """
    if IN_SLURM in environment:
        return _of_slurm(environment)
    if "LSB_JOBID" in environment:
        return _of_lsf(environment)
    return None


def _of_slurm(environment: Mapping[str, str]) -> Allocation | None:
    """Returns the nodes of the step if hvdrun is its only task (srun), else the nodes of the job.

    Several hvdruns in one step are jobs of their own, each on its host.
    """
    kind, nodes, tasks = "job", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
    step = environment.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < _SPECIAL_STEPS:
        if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            return None
        kind, nodes, tasks = "step", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    if nodes not in environment:
        return None
    try:
        names = list(node_names(environment[nodes]))
    except ValueError as error:
        raise LaunchError(f"{nodes} cannot be used: {error}; name the hosts with --hosts") from None
    slots = _tasks_per_node(environment.get(tasks, f"1(x{len(names)})"))
    if len(slots) != len(names):
        raise LaunchError(
            f"{nodes} has {len(names)} nodes, but {tasks}={environment[tasks]} does not have one number for "
            "each: name the hosts with --hosts"
        )
    own = environment.get("SLURMD_NODENAME")  # the node that this process runs on, by Slurm's name for it
    hosts = [
        Host("localhost" if name == own else name, count) for name, count in zip(names, slots, strict=True)
    ]
    return Allocation(f"Slurm {kind} {environment[IN_SLURM]}", hosts)


def _tasks_per_node(text: str) -> list[int]:
    """Returns 2, 2, 2, 1 for "2(x3),1"; nothing if that is malformed."""
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    counts = [[int(match["tasks"])] * int(match["nodes"] or 1) for match in found if match is not None]
    return list(itertools.chain(*counts)) if all(found) else []


def _of_lsf(environment: Mapping[str, str]) -> Allocation | None:
    """Returns the hosts of the variable that tells most: LSF leaves out LSB_HOSTS if it became too long."""
    for variable, read in _LSF.items():
        if not environment.get(variable):
            continue
        try:
            hosts = merge_hosts(read(environment[variable].split()))
        except (ValueError, OSError) as error:
            raise LaunchError(f"{variable} cannot be used: {error}; name the hosts with --hosts") from None
        return Allocation(f"LSF job {environment['LSB_JOBID']}", hosts) if hosts else None
    return None


def _pairs(words: Sequence[str]) -> list[Host]:
    return [Host(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True)]


def _names(words: Sequence[str]) -> list[Host]:
    return [Host(name, 1) for name in words]


def _lines_of_file(words: Sequence[str]) -> list[Host]:
    return _names(Path(" ".join(words)).read_text().split())


_LSF: Mapping[str, Callable[[Sequence[str]], list[Host]]] = {
    "LSB_MCPU_HOSTS": _pairs,  # "hostA 4 hostB 2"
    "LSB_DJOB_HOSTFILE": _lines_of_file,  # a name for each slot
    "LSB_HOSTS": _names,
}
