"""Initialises the library that the argument names, and nothing else."""

from __future__ import annotations

import sys


def main(kind: str) -> None:
    if kind == "sirtaki.torch":
        import sirtaki.torch as torch_hvd

        torch_hvd.init()
    elif kind == "sirtaki.numpy":
        import sirtaki.numpy as numpy_hvd

        numpy_hvd.init()
    elif kind == "mpi":
        import torch  # noqa: F401  # as a training script does
        from mpi4py import MPI  # noqa: F401  # importing it initialises
    elif kind == "gloo":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.destroy_process_group()
    else:
        sys.exit(f"there is no {kind}")


if __name__ == "__main__":
    main(sys.argv[1])
