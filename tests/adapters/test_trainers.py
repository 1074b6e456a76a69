"""Lightning, accelerate and Hugging Face's Trainer over the backend of torch.distributed, and beside it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from process_world import hvdrun, output_of
from tiers import Marks, exhaustive_unless

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

PROGRAMS = Path(__file__).with_name("programs_trainers.py")
AS_GLOO = Path(__file__).with_name("programs_as_gloo.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINERS = ("accelerate", "lightning", "transformers")
# The command that starts two ranks which torch.distributed finds.
LAUNCHERS = {
    "hvdrun": hvdrun(2, "--torch-env"),
    "torchrun": [
        *("env", "OMP_NUM_THREADS=1", sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", "2"),
    ],
}


def run(tmp_path: Path, *command: str | Path) -> str:
    # Trainers leave files in the working folder.
    return output_of(*command, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def python_of(launcher: str) -> list[str]:
    """Returns a launcher's command, up to the script."""
    return [*LAUNCHERS[launcher], *([sys.executable] if launcher == "hvdrun" else [])]


def tier_of(launcher: str, trainer: str) -> Marks:
    return exhaustive_unless(launcher == "hvdrun")


@pytest.mark.parametrize(
    ("launcher", "trainer"),
    [
        pytest.param(launcher, trainer, marks=tier_of(launcher, trainer))
        for launcher in LAUNCHERS
        for trainer in TRAINERS
    ],
)
def test_it_trains_as_over_gloo(launcher: str, trainer: str, tmp_path: Path) -> None:
    pytest.importorskip(trainer)
    assert run(tmp_path, *python_of(launcher), PROGRAMS, trainer, tmp_path).count("is done") == 2


def test_without_torchs_variables_trainers_are_unchanged(tmp_path: Path) -> None:
    """A training under plain hvdrun ends with the weights of one outside of it."""
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    run(tmp_path, *hvdrun(2, sys.executable, PROGRAMS, "unchanged", tmp_path))
    run(tmp_path, sys.executable, PROGRAMS, "unchanged", tmp_path)
    alone = torch.load(tmp_path / "1.0.pt")
    assert len(alone) > 10
    for rank in range(2):
        under_hvdrun = torch.load(tmp_path / f"2.{rank}.pt")
        assert all(torch.equal(under_hvdrun[name], value) for name, value in alone.items())


@pytest.mark.parametrize(
    "trainer", [pytest.param(name, marks=exhaustive_unless(name == "lightning")) for name in TRAINERS]
)
def test_gloo_means_sirtaki(trainer: str, tmp_path: Path) -> None:
    """A program that names only gloo ends with the same bits."""
    pytest.importorskip(trainer)
    for option in ("--torch-env", "--as-gloo"):
        run(tmp_path, *hvdrun(2, option, sys.executable, AS_GLOO, trainer, tmp_path))
    for rank in range(2):
        theirs = torch.load(tmp_path / f"ProcessGroup.{rank}.pt")
        ours = torch.load(tmp_path / f"SirtakiGroup.{rank}.pt")
        assert theirs.keys() == ours.keys() != set()
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.exhaustive
def test_the_launcher_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    launch = [Path(sys.executable).with_name("accelerate"), "launch", "--cpu"]
    output = run(tmp_path, *hvdrun(2, "--as-gloo", *map(str, launch), AS_GLOO, "accelerate", tmp_path))
    assert output.count('"gloo" means sirtaki') == 1
    assert len(list(tmp_path.glob("SirtakiGroup.*.pt"))) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_the_example_learns(trainer: str, ranks: int, tmp_path: Path) -> None:
    pytest.importorskip(trainer)
    command = python_of("hvdrun") if ranks == 2 else [sys.executable]
    output = run(tmp_path, *command, EXAMPLES / f"{trainer}_digits.py")
    found = re.search(r"test accuracy ([\d.]+)% on (\d) rank", output)
    assert found is not None, output
    assert float(found[1]) >= 90
    assert found[2] == str(ranks)
