"""Each benchmark of a technique has a picture of its results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"processor": "a processor", "cores": 2, "load": 0.1, "date": "2026-11-24"}
SIZES = (1 << 20, 64 << 20)
FORMATS = ("float32", "bfloat16", "int8", "int8, feedback", "fp8", "fp8, feedback")
RESULTS: dict[str, dict[str, Any]] = {
    "collectives.py": {
        "ranks": 2,
        "rows": [
            {"collective": "allreduce", "bytes": size, "who": who, "busbw": 2.0}
            for size in SIZES
            for who in ("sirtaki torch", "gloo", "mpi", "memory bound")
        ],
    },
    "train_step.py": {
        "models": [
            {
                "model": "a, b",
                "times": {"sync": [50.0]},
                "costs": {who: [5.0, -1.0, 6.0] for who in ("ddp", "sirtaki", "prototype")},
            }
        ],
    },
    "recovery.py": {
        "sirtaki": {"kills": [{"seconds": 0.1}, {"seconds": 0.2}]},
        "torchrun": {"kills": [{"seconds": 4.6}]},
    },
    "compression.py": {
        "hosts": 2,
        "rate": "1gbit",
        "rows": [
            {"bytes": size, "format": name, "speed": [2.0, 1.9, 2.1]} for size in SIZES for name in FORMATS
        ],
    },
    "compression_step.py": {
        "hosts": 2,
        "rate": "none",
        "rows": [
            {"model": model, "way": name, "gain": 1.5}
            for model in ("linear", "transformer")
            for name in ("alone", "none", "powersgd(4)")
        ],
    },
    "deadlines.py": {
        "ranks": 4,
        "rows": [
            {"delay": delay, "way": way, "gain": 1.3, "loss": 0.01}
            for delay in (0.5, 1.0)
            for way in ("synchronous", "accumulate", "drop")
        ],
    },
    "staleness.py": {
        "ranks": 8,
        "milliseconds": 30,
        "rows": [
            {"slow": slow, "method": method, "staleness": staleness, "share": 0.9, "accuracy": 0.95}
            for slow in ("none", "one", "each")
            for method, staleness in [*(("optimizer", bound) for bound in range(4)), ("table", 3)]
        ],
    },
    "sharding.py": {
        "ranks": 2,
        "rows": [
            {"model": "a, b", "shard": shard, "ratio": [1.0, 0.9, 1.1], "state": 2.0, "gradients": 1.0}
            for shard in ("none", "state", "gradients")
        ],
    },
    "overlap_forward.py": {
        "hosts": 2,
        "rate": "1gbit",
        "rows": [
            {"model": model, "way": way, "gain": 1.1}
            for model in ("vgg", "transformer", "vgg elsewhere")
            for way in ("alone", "synchronous", "overlap_forward")
        ],
    },
    "local_steps.py": {
        "hosts": 2,
        "rate": "1gbit",
        "steps": [
            {"model": model, "method": method, "every": every, "gain": 2.0}
            for model in ("linear", "transformer")
            for method, every in (("synchronous", 1), ("LocalSGD", 10), ("DiLoCo", 100))
        ],
        "losses": [
            {"method": method, "every": 1, "losses": [2.0, 2.1]}
            for method in ("synchronous", "DiLoCo(0.1)", "int8")
        ],
    },
    "simulate.py": {
        "network": "8 ranks a host",
        "tensors": 100,
        "negotiation": [
            {
                "ranks": ranks,
                **{step: {"latency": 9.0, "frames_in": 7, "bytes_in": 8} for step in ("first", "steady")},
            }
            for ranks in (8, 64)
        ],
        "allreduce": [{"ranks": 64, "size": 1 << 26, "microseconds": 2.0, "frames": 3, "bytes": 4}],
        "start": [{"ranks": 64, "seconds": 0.1, "sent_frames": 9, "sent_by_server": 100}],
        "loss": [{"ranks": 64, "host": host, "last": 3.0, "frames": 4, "bytes": 5} for host in (False, True)],
    },
    "model_parallel.py": {
        "divisions": [
            {"division": division, "times": {"gloo": [3.0, 4.0, 5.0], "sirtaki": [2.0, 3.0, 4.0]}}
            for division in ("tensor parallel", "pipeline")
        ],
    },
}


def test_the_results_of_each_technique_become_a_picture_in_docs_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    plot = importlib.import_module("plot")
    pictures = plot.PICTURES
    assert set(pictures) == set(RESULTS)
    files = []
    for script, results in RESULTS.items():
        file = tmp_path / f"{script}.json"
        file.write_text(json.dumps({"command": [f"benchmarks/{script}"], "machine": MACHINE, **results}))
        files.append(str(file))
    monkeypatch.setattr("sys.argv", ["plot.py", *files, "--folder", str(tmp_path)])
    plot.main()
    assert capsys.readouterr().out.count("wrote") == len(RESULTS)
    for picture in pictures.values():
        content = (tmp_path / picture.file).read_bytes()
        width, height = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
        assert (width, height) == (1152, 604)


def test_a_file_without_results_that_have_a_picture_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    plot = importlib.import_module("plot")
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps({"command": ["benchmarks/hosts.py"], "machine": MACHINE, "rows": []}))
    monkeypatch.setattr("sys.argv", ["plot.py", str(file), "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"hosts\.json holds no results"):
        plot.main()
