"""The pages for users of Horovod and DDP: their code runs, and the promised features exist."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE, hvdrun

from .pages import path_of

torch = pytest.importorskip("torch")

import sirtaki.torch as hvd  # noqa: E402  # it imports torch

RUN_BLOCKS = Path(__file__).with_name("run_blocks.py")
FROM_HOROVOD, FROM_DDP = path_of("migrating_from_horovod.md"), path_of("migrating_from_ddp.md")
NAMES, ON_GPUS = path_of("horovod_names.md"), path_of("gpu.md")

# Horovod 0.28's public functions for torch: those that share a signature, and its parameters in order.
SIGNATURES = {
    "init": "comm process_sets",
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_async allreduce_ allreduce_async_": (
        "tensor average name op prescale_factor postscale_factor process_set"
    ),
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_": (
        "tensors average name op prescale_factor postscale_factor process_set"
    ),
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather allgather_async": "tensor name process_set",
    "grouped_allgather grouped_allgather_async": "tensors name process_set",
    "broadcast broadcast_ broadcast_async broadcast_async_": "tensor root_rank name process_set",
    "alltoall alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "join": "device",
    "barrier add_process_set remove_process_set": "process_set",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name",
    "DistributedOptimizer": (
        "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor "
        "num_groups groups sparse_as_dense process_set"
    ),
    "start_timeline": "file_path mark_cycles",
    "poll synchronize": "handle",
}
PARAMETERS = {name: texts[1].split() for texts in SIGNATURES.items() for name in texts[0].split()}
# Horovod's other public names.
OTHERS = """
    shutdown is_initialized size rank local_size local_rank cross_size cross_rank is_homogeneous
    mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built ddl_built ccl_built cuda_built
    rocm_built nccl_built stop_timeline Average Sum Adasum Min Max Product ProcessSet global_process_set
    HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError Compression.none
    Compression.fp16 SyncBatchNorm elastic.run elastic.TorchState elastic.ElasticSampler
"""
HOROVOD = {*PARAMETERS, *OTHERS.split()}
KERAS_3 = ("From Keras 2 to Keras 3", "The launcher")
ROW = re.compile(r"^\|([^|]*)\|", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")


def section(page: Path, start: str, end: str | None = None) -> str:
    """Returns the text between two headings."""
    text = page.read_text().partition(f"## {start}\n")[2]
    assert text, f"{page} has no part '{start}'"
    return text.partition(f"## {end}\n")[0] if end else text


def names_in_first_column(text: str) -> set[str]:
    return {name for row in ROW.findall(text) for name in CODE.findall(row)}


def exists(name: str) -> bool:
    found: object = hvd
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def test_the_code_of_the_pages_runs() -> None:
    pages = (NAMES, FROM_DDP, ON_GPUS)
    command = hvdrun(2, sys.executable, RUN_BLOCKS, *pages)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in pages:
        blocks = page.read_text().count("```python\n")
        assert blocks
        assert done.stdout.count(f"{page.name}: ran {blocks} blocks") == 2


def test_each_name_of_horovod_is_there_or_said_to_be_missing() -> None:
    there = names_in_first_column(NAMES.read_text())
    missing = names_in_first_column(section(FROM_HOROVOD, "What is missing"))
    assert there | missing >= HOROVOD
    assert there <= HOROVOD
    assert {name for name in there if not exists(name)} == set()
    assert {name for name in HOROVOD & missing if exists(name)} == set()


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_function_takes_what_that_of_horovod_does(name: str) -> None:
    ours = list(inspect.signature(getattr(hvd, name)).parameters)
    assert ours[: len(PARAMETERS[name])] == PARAMETERS[name]


def names_of_sirtaki(text: str) -> set[str]:
    names = set(re.findall(r"\bhvd\.((?:[A-Za-z_]\w*\.?)+)", text))
    assert names
    return names


@pytest.mark.parametrize("page", [NAMES, FROM_HOROVOD, FROM_DDP, ON_GPUS], ids=lambda page: page.stem)
def test_each_name_of_sirtaki_on_a_page_exists(page: Path) -> None:
    text = page.read_text()
    if page == FROM_HOROVOD:
        text = text.replace(section(page, *KERAS_3), "")
    assert {name for name in names_of_sirtaki(text) if not exists(name)} == set()


def test_each_name_of_the_page_for_keras_3_exists() -> None:
    """The first column lists Horovod's calls. A separate process imports Keras, which chooses a backend."""
    pytest.importorskip("keras")
    names = names_of_sirtaki(ROW.sub("|", section(FROM_HOROVOD, *KERAS_3)))
    look = "\n".join(f"hvd.{name}" for name in sorted(names))
    program = f"import sirtaki.keras as hvd\n{look}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [FROM_HOROVOD, FROM_DDP], ids=lambda page: page.stem)
def test_each_option_and_setting_of_the_launcher_exists(page: Path) -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "sirtaki.runner", "--help"], capture_output=True, text=True, check=True
    ).stdout
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_text))
    known |= {f"SIRTAKI_{name[2:].replace('-', '_').upper()}" for name in known}
    known |= {"SIRTAKI_RANK", "SIRTAKI_SIZE", "SIRTAKI_LOCAL_RANK"}
    text = section(page, "The launcher", "What is missing")
    first_columns = ROW.sub("|", text)  # the removed first column is the other launcher's
    used = set(re.findall(r"(?<![\w-])--?[a-z][\w-]+", " ".join(CODE.findall(first_columns))))
    used |= set(re.findall(r"\bSIRTAKI_[A-Z_]*[A-Z]\b", page.read_text()))
    assert used
    assert used - known == set()
