"""A GPU for each rank: JAX itself would reserve memory on every GPU, and work on the first."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path

import jax

from sirtaki.bindings.context import Context
from sirtaki.jax import _private


def use_own_gpu(context: Context) -> None:
    """Restricts JAX to a single GPU of the host, by the rank's number there.

    Does nothing on a host with a single rank, or where the GPUs are restricted already: to a single GPU by
    the launcher (CUDA_VISIBLE_DEVICES), or by the program (jax_cuda_visible_devices, jax_default_device).
    Warns on rank 0 if JAX has chosen its GPUs before, or if there are fewer GPUs than ranks.
    """
    topology, gpus = context.topology, _count()
    if topology.local_size == 1 or gpus == 0 or _is_restricted():
        return
    if _private.has_chosen_devices():
        if len(jax.local_devices()) > 1 and jax.default_backend() == "gpu":
            _warn(
                context,
                "JAX had chosen its GPUs before hvd.init(), so all ranks of a host work on its first GPU: "
                "call hvd.init() before JAX's first computation",
            )
        return
    jax.config.update("jax_cuda_visible_devices", str(topology.local_rank % gpus))
    ranks = max(Counter(peer.host_index for peer in topology.peers).values())
    if ranks > gpus:
        _warn(
            context,
            f"{ranks} ranks of this job run on one host, which has {gpus} GPU(s): ranks that share one "
            "exchange arrays through the CPU, and JAX reserves most of its memory for each of them unless "
            "XLA_PYTHON_CLIENT_PREALLOCATE is false. Start one rank for each GPU (hvdrun -np)",
        )


def _warn(context: Context, text: str) -> None:
    if context.rank == 0:
        warnings.warn(text, stacklevel=4)


def _count() -> int:
    """Returns the number of GPUs from which a rank may choose its own; 0 if it has been assigned a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))  # opens neither the driver nor NCCL
    names = [name for name in visible.split(",") if name.strip()]
    return len(names) if len(names) > 1 else 0


def _is_restricted() -> bool:
    return _private.visible_gpus() != "all" or jax.config.jax_default_device is not None
