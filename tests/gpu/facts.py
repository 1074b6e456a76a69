"""Step 0: the GPU, the driver and the libraries that are found, and their versions.

Fails if there is no GPU, or if sirtaki finds no driver or no NCCL.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
from card import IS_DRY_RUN, report

import sirtaki.torch as hvd

QUERY = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,mig.mode.current",
    "--format=csv,noheader",
)
MOST_SECONDS = 20.0  # of a command


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not here"


def version_of_xlas_interface() -> str:
    """Returns the version of XLA's foreign function interface, by jaxlib's own header."""
    try:
        import jax

        header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # or of versions that do not fit
        return f"not here: {error}"
    return ".".join(re.findall(r"#define XLA_FFI_API_M(?:AJ|IN)OR\s+(\d+)", header))


def output_of(*command: str) -> str:
    """Returns a command's output, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()


def main() -> None:
    gpus = torch.cuda.device_count()
    report(gpus=[torch.cuda.get_device_name(gpu) for gpu in range(gpus)], python=platform.python_version())
    report(torch=torch.__version__, cuda_of_torch=torch.version.cuda)
    if gpus:
        report(nccl_of_torch=".".join(map(str, torch.cuda.nccl.version())))
    report(jax=version_of("jax"), jaxlib=version_of("jaxlib"), xla_ffi=version_of_xlas_interface())
    report(driver_of_sirtaki=hvd.cuda_built(), nccl_of_sirtaki=hvd.nccl_built())
    if not IS_DRY_RUN:
        report(nvidia_smi=output_of(*QUERY).splitlines())
        print(output_of("nvidia-smi", "topo", "-m"))
        # last, as it imports all frameworks
        print(output_of(sys.executable, "-m", "sirtaki.runner", "--check-build"))
        if not gpus:
            sys.exit("torch finds no GPU here: torch.cuda.device_count() is 0")
    if not hvd.cuda_built() or not hvd.nccl_built():
        sys.exit(
            "sirtaki finds no libcuda.so.1 or no libnccl.so.2; the lines above say where it was searched for"
        )


if __name__ == "__main__":
    main()
