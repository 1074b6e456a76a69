"""Whole programs over the backend of torch.distributed, under each way of starting them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from process_world import hvdrun, output_of

from sirtaki.bindings.errors import UnsupportedError

pytest.importorskip("torch")

PROGRAMS = Path(__file__).with_name("programs_torch_backend.py")
SUITE = Path(__file__).with_name("programs_torch_suite.py")
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


SPAWNED = [
    "from_a_file",
    "from_one_store_twice",
    "futures_of_groups_that_end",
    "shared_with_horovods_calls",
]

ENDING = """
import atexit
import threading

def tell(moment):
    print(moment, "sirtaki-futures" in [thread.name for thread in threading.enumerate()])

atexit.register(tell, "the interpreter ends:")  # it runs last
import torch
import torch.distributed as dist

dist.init_process_group("sirtaki", init_method="sirtaki://")
# No rank sends, so the thread waits until the interpreter ends. An operation that has ended at once would
# prove nothing, because it needs no thread.
future = dist.irecv(torch.ones(1), 1 - dist.get_rank()).get_future()
tell("the program ends:")
"""


@pytest.mark.parametrize("program", SPAWNED)
def test_spawned(program: str, tmp_path: Path) -> None:
    assert f"{program} is done" in output_of(sys.executable, PROGRAMS, program, tmp_path)


def test_hvdrun(tmp_path: Path) -> None:
    output = output_of(*hvdrun(2, sys.executable, PROGRAMS, "under_hvdrun", tmp_path))
    assert output.count("is done") == 2


def test_hvdrun_with_torchs_variables(tmp_path: Path) -> None:
    hvdrun_of_two = hvdrun(2, "--torch-env", sys.executable, PROGRAMS, "with_torchs_variables", tmp_path)
    assert output_of(*hvdrun_of_two).count("is done") == 2


def test_torchs_checks_in_detail(tmp_path: Path) -> None:
    command = hvdrun(2, sys.executable, PROGRAMS, "under_detail", tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert output_of(*command).count("is done") == 2


def test_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = output_of(sys.executable, *torchrun, PROGRAMS, "under_torchrun", tmp_path)
    assert output.count("is done") == 2


def test_torchs_own_cases(tmp_path: Path) -> None:
    """Each case that passes over gloo passes, or is refused with a reason; all ranks exit with code 0."""
    pytest.importorskip("expecttest")
    output = output_of(*hvdrun(3, sys.executable, SUITE, tmp_path, OMP_NUM_THREADS="1"))
    passed = re.findall(r"(\d+) cases passed", output)
    assert len(passed) == 3, output
    assert min(map(int, passed)) > 60, output
    assert "test_" not in output, output


def test_torch_finds_the_backend_by_itself(tmp_path: Path) -> None:
    """The entry point in pyproject.toml is enough: the program imports torch only."""
    declared = PYPROJECT.read_text().partition('[project.entry-points."torch.backends"]')[2]
    entry = next(line for line in declared.splitlines() if line.startswith("sirtaki = "))
    metadata = tmp_path / "found-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: found\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\n" + entry.replace('"', "") + "\n")
    code = f"""
import sys; sys.path.append({str(tmp_path)!r})
import torch, torch.distributed as dist
assert "sirtaki.autoload" in sys.modules and "sirtaki.torch" not in sys.modules
dist.init_process_group("sirtaki", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2); dist.all_reduce(tensor); print(tensor, "is done")
"""
    assert "is done" in output_of(sys.executable, "-c", code)


def test_a_version_of_torch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sirtaki.torch.backend import group

    monkeypatch.setattr(group, "_OLDEST_TORCH", "99.1")
    with pytest.raises(
        UnsupportedError, match=r"needs torch 99\.1 or newer \(tested with 2\.8, .* but this is"
    ):
        group.create(None)


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    output_of(sys.executable, PROGRAMS, "lost_rank", tmp_path)


def test_no_thread_completes_futures_when_the_interpreter_ends(tmp_path: Path) -> None:
    """It would be stopped inside torch's code, which ends the process by an abort."""
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    output = output_of(*hvdrun(2, sys.executable, script))
    assert output.count("the program ends: True") == output.count("the interpreter ends: False") == 2
