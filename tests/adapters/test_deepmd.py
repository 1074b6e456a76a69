"""DeePMD-kit, which imports horovod.tensorflow: sessions of TensorFlow 1, its own command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from process_world import hvdrun, run

numpy = pytest.importorskip("numpy")
pytest.importorskip("deepmd")

STEPS = 6
NET = {"seed": 1, "precision": "float64", "resnet_dt": False}
INPUT: dict[str, Any] = {
    "model": {
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [8, 16],
            "rcut_smth": 0.5,
            "rcut": 4.0,
            "neuron": [4, 8],
            **NET,
            "axis_neuron": 2,
        },
        "fitting_net": {"neuron": [8, 8], **NET},
    },
    "learning_rate": {"type": "exp", "start_lr": 0.01, "stop_lr": 0.001, "scale_by_worker": "none"},
    "loss": {"type": "ener"},
    "training": {
        "training_data": {"systems": ["."], "batch_size": 1},
        "numb_steps": STEPS,
        "seed": 10,
        "disp_freq": 1,
        "disp_file": "curve",
        "save_freq": STEPS,
    },
}


def write_input(folder: Path) -> None:
    """Writes one frame of 12 atoms: every rank draws the same batch, so the mean of gradients is each."""
    source, atoms = numpy.random.default_rng(0), 12
    values = {
        "box": 10.0 * numpy.eye(3).reshape(1, 9),
        "coord": 10.0 * source.random((1, 3 * atoms)),
        "energy": source.standard_normal(1),
        "force": 0.1 * source.standard_normal((1, 3 * atoms)),
    }
    (folder / "set.000").mkdir(parents=True)
    for name, value in values.items():
        numpy.save(folder / "set.000" / name, value)
    (folder / "type.raw").write_text("0\n1\n1\n" * (atoms // 3))
    (folder / "type_map.raw").write_text("O\nH\n")
    (folder / "input.json").write_text(json.dumps(INPUT))


def train(folder: Path, *launcher: str | Path | int) -> str:
    """Trains in a new folder; returns the output."""
    write_input(folder)
    dp = [sys.executable, "-m", "deepmd", "--tf", "train", "-m", "workers", "input.json"]
    done = run(*launcher, *dp, cwd=folder)
    if "of TensorFlow used to compile this" in done.stderr:
        pytest.skip("this DeePMD-kit was compiled for another version of TensorFlow")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_two_ranks_train_like_one_process(tmp_path: Path) -> None:
    train(tmp_path / "one")
    timeline = tmp_path / "timeline.json"
    said = train(tmp_path / "two", *hvdrun(2, "--as-horovod", "--timeline-filename", timeline))
    assert "receive global variables from task#0" in said
    assert (tmp_path / "two" / "curve").read_text() == (tmp_path / "one" / "curve").read_text()
    exchanged = json.loads(timeline.read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in exchanged if e["name"] == "thread_name"}
    gradients = [place for place, name in names.items() if "allreduce" in name]
    transfers = [(e["pid"], e["tid"]) for e in exchanged if e["name"] == "TRANSFER"]
    assert gradients
    assert all(transfers.count(place) == STEPS for place in gradients)
