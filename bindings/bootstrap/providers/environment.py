"""Ranks described by sirtaki's own variables, which hvdrun sets, or any launcher that can set three of them.

hvdrun serves the rendezvous itself, and announces this in SIRTAKI_LAUNCHER. Otherwise rank 0 serves it at
SIRTAKI_RENDEZVOUS. The number of the rank, and of all ranks, may also be in variables of another launcher.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping

from sirtaki.bindings.bootstrap.connection.address import join_address, split_addresses
from sirtaki.bindings.bootstrap.job import Job, RendezvousError, read_key
from sirtaki.bindings.bootstrap.providers.world import (
    VERSION,
    World,
    key_of,
    number_in,
    served_by_rank_0,
    start_timeout,
)

# The variables of a rank's number, and those of the number of ranks ("": the launcher sets none). An indexed
# Kubernetes job numbers its pods
# (https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode). PMIx gives a process its
# number and the name of its job as variables, but not the job's size.
_POD, _PMIX = "JOB_COMPLETION_INDEX", "PMIX_RANK"
_NUMBERS = {
    "SIRTAKI_RANK": "",
    _POD: "",
    "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_SIZE",  # jsrun, under LSF
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
    _PMIX: "",
}
_SIZE = "SIRTAKI_SIZE"
# Launchers that tell a process how many there are, but not where the first one is.
_WITHOUT_ADDRESS = {"jsrun": "JSM_NAMESPACE_SIZE", "flux run": "FLUX_JOB_SIZE"}


def find(environment: Mapping[str, str]) -> World | None:
    """Returns the world that the variables describe; None if none of them is set."""
    if not any(name in environment for name in ("SIRTAKI_RANK", "SIRTAKI_SIZE", "SIRTAKI_RENDEZVOUS")):
        return None
    rank = next((name for name in _NUMBERS if name in environment), "SIRTAKI_RANK")
    size_name = _SIZE if _SIZE in environment else _NUMBERS[rank] or _SIZE
    for name in (rank, size_name, "SIRTAKI_RENDEZVOUS"):
        if name not in environment:
            raise RendezvousError(
                f"{name} is not set: start the ranks with hvdrun, or set SIRTAKI_RANK, SIRTAKI_SIZE and "
                "SIRTAKI_RENDEZVOUS (host:port, where rank 0 listens) for each"
            )
    number, size, address = number_in(environment, rank), number_in(environment, size_name), ""
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


def check_lone_rank(environment: Mapping[str, str]) -> str:
    """Returns a warning if this process trains alone although several seem to have started; else "".

    Raises RendezvousError if they certainly have.
    """
    for launcher, name in _WITHOUT_ADDRESS.items():
        if environment.get(name, "1") != "1":
            raise RendezvousError(
                f"{launcher} has started {environment[name]} processes, but does not say where the first one "
                "runs: set SIRTAKI_RENDEZVOUS=HOST:PORT to its host and a free port there"
                + (", or install mpi4py for the MPI of jsrun" if launcher == "jsrun" else "")
            )
    if environment.get(_POD, "0") != "0":
        return (
            f"this is pod {environment[_POD]} of an indexed Kubernetes job, but it trains alone: set "
            "SIRTAKI_SIZE and SIRTAKI_RENDEZVOUS so that the pods train together"
        )
    if environment.get(_PMIX, "0") != "0":
        return (
            f"this is process {environment[_PMIX]} of a job under PMIx, which does not say of how many, and "
            "it trains alone: set SIRTAKI_SIZE and SIRTAKI_RENDEZVOUS so that they train together"
        )
    return ""


# ---- Ranks that Kubeflow Trainer has started, one in each pod, without torchrun ------------------------
# Trainer describes the pods in PET_*, the variables of torchrun's options (torch.distributed.run); rank 0
# listens at the address that is meant for torchrun's store.


_KUBEFLOW_NAMES = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def find_kubeflow(environment: Mapping[str, str]) -> World | None:
    """Returns the world of a Kubeflow TrainJob's pods; None outside a TrainJob."""
    if not all(environment.get(name) for name in _KUBEFLOW_NAMES):
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


# ---- Ranks of a cluster that TF_CONFIG describes -------------------------------------------------------
# https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
# The ranks are the chief, if there is one, and then the workers; rank 0 listens at its own address.


_TYPES = ("chief", "master", "worker")


def find_tf_config(environment: Mapping[str, str]) -> World | None:
    """Returns the world of TF_CONFIG; None without it, or if this is no rank (for example an evaluator)."""
    if not environment.get("TF_CONFIG"):
        return None
    try:
        config = json.loads(environment["TF_CONFIG"])
        cluster = {str(kind): list(places) for kind, places in config.get("cluster", {}).items()}
        task = (
            str(config.get("task", {}).get("type", "worker")),
            int(config.get("task", {}).get("index", 0)),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise RendezvousError(f"TF_CONFIG is malformed: {error}") from None
    tasks = [(kind, index) for kind in _TYPES for index in range(len(cluster.get(kind, [])))]
    if len(tasks) < 2 or task[0] not in _TYPES:
        return None
    if task not in tasks:
        raise RendezvousError(
            f"TF_CONFIG says that this is {task[0]} {task[1]}, which its cluster does not name"
        )
    first = str(cluster[tasks[0][0]][0])
    return served_by_rank_0(tasks.index(task), len(tasks), first, "tf-config", environment)
