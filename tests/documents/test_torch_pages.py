"""The programs at the beginning of pages about torch run, in one job, and do what their pages say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE, hvdrun

from .pages import FITS, programs_of

torch = pytest.importorskip("torch")

AT_PLACES = """
addresses = {parameter.grad.data_ptr() for parameter in model.parameters()}
model(torch.randn(32, 512)).square().mean().backward()
assert addresses == {parameter.grad.data_ptr() for parameter in model.parameters()}
print("KEPT")
"""
# By page: the number of its programs, the one that runs, and a check that is added to its end.
PAGES = {
    "compression": (1, 0, ""),
    "deadlines": (1, 0, FITS),
    "local_sgd": (3, 0, FITS),
    "overlap": (1, 0, FITS),
    "parameter_server": (2, 0, FITS),
    "sharding": (1, 0, ""),
    "shared_memory": (2, 1, AT_PLACES),
}
pytestmark = pytest.mark.xdist_group("torch_pages")  # one process of pytest runs the job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the outputs of all programs on two ranks."""
    folder = tmp_path_factory.mktemp("pages")
    for page, (count, index, check) in PAGES.items():
        programs = programs_of(f"{page}.md")
        assert len(programs) == count, page
        (folder / f"{page}.py").write_text(programs[index] + check)
    runner = Path(__file__).with_name("run_programs.py")
    command = hvdrun(2, sys.executable, "-W", "error::UserWarning", runner, folder)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def outputs(folder: Path, page: str) -> list[str]:
    """Returns what each rank has printed."""
    return [(folder / f"{page}-{rank}").read_text() for rank in range(2)]


@pytest.mark.parametrize("page", ["deadlines", "local_sgd", "overlap", "parameter_server"])
def test_parameters_are_equal_and_fit(page: str, folder: Path) -> None:
    assert outputs(folder, page) == ["FITS\n"] * 2


def test_gradients_in_shared_memory_keep_their_places(folder: Path) -> None:
    assert outputs(folder, "shared_memory") == ["KEPT\n"] * 2


def test_gradients_are_compressed(folder: Path) -> None:
    counted = [ast.literal_eval(text) for text in outputs(folder, "compression")]
    assert [one["exchanges"] for one in counted] == [20, 20]  # 10 of 30 are exact
    assert all(0 < one["sent_bytes"] < 0.2 * one["exact_bytes"] for one in counted)


def test_state_is_divided(folder: Path) -> None:
    kept = [int(text) for text in outputs(folder, "sharding")]
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(saved)
    assert all(int(values["step"]) == 30 for values in plain.state.values())
    whole = sum(tensor.numel() for values in plain.state.values() for tensor in values.values())
    counters = 3  # three parameters are cut, so that both ranks count their steps
    assert sum(kept) == whole + counters
    assert max(kept) < 0.51 * whole
