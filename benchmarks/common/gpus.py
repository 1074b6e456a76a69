"""Jobs with one rank per GPU, or on the CPU to try a benchmark of GPUs where there is none."""

from __future__ import annotations

import sys
from argparse import Namespace

import torch

from common.jobs import Job, hvdrun
from common.options import Option, number

RANKS = number("-np", 0, "how many ranks; 0: as many as there are GPUs", dest="ranks")
TRY_ON_CPU = Option(
    "--try-on-cpu", action="store_true", help="tries the benchmark itself where there is no GPU"
)


def job_on_gpus(options: Namespace, worker: type, *arguments: str) -> Job:
    """Starts ranks of a class, which has the kind of device as an argument, and these; options: the above."""
    gpus = torch.cuda.device_count()
    ranks = options.ranks or gpus
    if not options.try_on_cpu:
        if not gpus:
            sys.exit("there is no GPU here: this compares operations on GPUs, so nothing was measured")
        if ranks > gpus:
            sys.exit(f"there are {gpus} GPU(s) here, and each rank takes one: say -np {gpus}")
    kind = "cpu" if options.try_on_cpu else "cuda"
    return Job(hvdrun(ranks), ranks, worker, kind, *arguments, settings={"SIRTAKI_GPU_BACKEND": "nccl"})


def own_device(kind: str, local_rank: int) -> tuple[torch.device, str]:
    """Returns a rank's device, which is torch's current one from now on, and torch's backend for it."""
    if kind == "cpu":
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device, "nccl"


def finish(device: torch.device) -> None:
    """Waits for a GPU; the CPU has finished an operation when it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
