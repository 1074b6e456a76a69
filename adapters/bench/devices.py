"""The device of each rank's tensors, and the peers that the ranks' devices do not allow."""

from __future__ import annotations

import socket

import sirtaki.numpy as hvd
from sirtaki.common import basics
from sirtaki.runner.bench.messages import Plan
from sirtaki.runner.bench.peers import CPU, NCCL


def missing_gpu(plan: Plan) -> str:
    """Returns why a rank has no GPU although the plan wants one, else "". All ranks have to call it."""
    reasons = [] if plan.device == CPU else hvd.allgather_object(_why_no_gpu())
    return next((reason for reason in reasons if reason), "")


def own_device(plan: Plan) -> str:
    """Returns the device of this rank's tensors, such as "cuda:0", and makes it torch's own."""
    if plan.device == CPU:
        return CPU
    import torch

    device = basics.local_rank() % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return f"{plan.device}:{device}"


def unusable_peers(plan: Plan) -> dict[str, str]:
    """Returns the peers that cannot work on the ranks' devices, and why. All ranks have to call it."""
    if NCCL not in plan.peers:
        return {}
    reasons = [reason for reason in hvd.allgather_object(_why_no_nccl()) if reason]
    return {NCCL: reasons[0]} if reasons else {}


def _why_no_gpu() -> str:
    """Returns the reason why this rank has no GPU; "" if it has one."""
    import torch

    if torch.cuda.is_available():
        return ""
    is_built = torch.backends.cuda.is_built()
    why = "finds no CUDA device" if is_built else "was built without CUDA"
    return f"torch {torch.__version__} on {socket.gethostname()} {why}: leave out --device cuda"


def _why_no_nccl() -> str:
    """Returns the reason why NCCL does not work on this rank; "" if it may."""
    import torch
    import torch.distributed as dist

    host, gpus, ranks = socket.gethostname(), torch.cuda.device_count(), basics.local_size()
    if not (dist.is_available() and dist.is_nccl_available()):
        return f"torch {torch.__version__} on {host} was built without NCCL"
    if gpus < ranks:
        return f"{host} has {ranks} ranks and {gpus} GPUs, and NCCL takes one rank for each GPU"
    return ""
