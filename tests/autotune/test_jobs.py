"""Autotune in jobs that begin with bad settings: what it keeps, records and says, and that no bit changes."""

from __future__ import annotations

import csv
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE, hvdrun

from sirtaki.common.autotune.model import TUNED

pytest.importorskip("torch")

# A rank pauses while chunks are tiny, as if the exchange took longer: what they cost by themselves depends on
# whatever else the cores do.
# Without a number of steps, training ends when autotune does.
TRAINING = """
import hashlib, sys, time
import torch
import sirtaki.torch as hvd
from sirtaki.bindings.library import setting_in_use
from sirtaki.bindings.context import current
from sirtaki.common.autotune import tuner_of

most_steps, *names = sys.argv[1:]
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
layers = {f"layer{i}": torch.nn.Parameter(torch.randn(1 << 14)) for i in range(4)}
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.values(), lr=1e-3), layers.items())
tuner, steps, is_over = tuner_of(current()), 0, False
while not is_over:
    optimizer.zero_grad()
    sum((one * (hvd.rank() + 1.5)).sum() for one in layers.values()).backward()
    if setting_in_use(current(), "chunk_bytes") == "4096":
        with current().steps.exposed:
            time.sleep(0.04)
    optimizer.step()
    steps += 1
    is_over = steps == int(most_steps)
    if not int(most_steps) and steps % 50 == 0:
        is_over = hvd.broadcast_object(tuner is None or tuner.is_over)
hvd.barrier()  # its decision carries the last settings
bits = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in layers.values())).hexdigest()
print("END", hvd.rank(), steps, bits, *(setting_in_use(current(), name) for name in names), flush=True)
"""

STEPS = 24
# Rank 0 waits for rank 1, so that there is something to save also on a busy machine.
JAX = f"""
import time
import jax, optax
import jax.numpy as jnp
import sirtaki.jax as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
parameters = {{"w": jnp.ones(8)}}
state = optimizer.init(parameters)


def step(parameters, state):
    gradients = jax.tree.map(lambda one: one * (hvd.rank() + 1.0), parameters)
    updates, state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state


for _ in range({STEPS}):
    time.sleep(0.02 * hvd.rank())
    parameters, state = step(parameters, state)
"""
KERAS = f"""
import time
import keras
import sirtaki.keras as hvd

hvd.init()
variable = keras.Variable([1.0, 2.0], name="w")
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
for _ in range({STEPS}):
    time.sleep(0.02 * hvd.rank())
    optimizer.apply([keras.ops.convert_to_tensor([1.0, 2.0])], [variable])
"""
# Two optimizers take turns inside a compiled program; the steps of the first one are measured. A rank pauses
# while nothing is fused. Training ends when autotune does, or after a number of programs.
COMPILED = """
import hashlib, sys, time
import jax, optax
import jax.numpy as jnp
import sirtaki.jax as hvd
from sirtaki.bindings.library import setting_in_use
from sirtaki.bindings.context import current
from sirtaki.common.autotune import tuner_of

most_programs, *names = sys.argv[1:]
hvd.init()
optimizers = [hvd.DistributedOptimizer(optax.sgd(1e-3)) for _ in range(2)]
parameters = {f"layer{i}": jnp.ones(64) for i in range(32)}


def step(optimizer, carried):
    parameters, state = carried
    gradients = jax.tree.map(lambda one: one * (hvd.rank() + 1.5), parameters)
    updates, state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state


@jax.jit
def program(first, second):
    return step(optimizers[0], first), step(optimizers[1], second)


carried = [(parameters, one.init(parameters)) for one in optimizers]
tuner, programs, is_over = tuner_of(current()), 0, False
while not is_over:
    if setting_in_use(current(), "fusion_threshold") == "0":
        time.sleep(0.02)
    carried = jax.block_until_ready(program(*carried))
    programs += 1
    is_over = programs == int(most_programs)
    if not int(most_programs) and programs % 50 == 0:
        is_over = hvd.broadcast_object(tuner is None or tuner.is_over)
hvd.barrier()  # its decision carries the last settings
bits = hashlib.sha256(b"".join(one.tobytes() for one in jax.tree.leaves(carried))).hexdigest()
print("END", hvd.rank(), programs, bits, *(setting_in_use(current(), one) for one in names), flush=True)
"""
TWO_WORLDS = f"""
import sirtaki.numpy as hvd
from sirtaki.bindings.context import current
from sirtaki.bindings.observing.step_counters import Stepper

for _ in range(2):
    hvd.init()
    for _ in range({STEPS}):
        hvd.barrier()
        current().steps.end(by=Stepper("any"))
    hvd.shutdown()
"""
REDUCTION = (
    *(sys.executable, "-c"),
    "import numpy, sirtaki.numpy as hvd; hvd.init(); hvd.allreduce(numpy.ones(3), name='x')",
)


def run(folder: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs two ranks with one thread each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        hvdrun(2, *command),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=folder,
        env=environment,
    )


def train(
    folder: Path, most_steps: int, *options: str, program: str = TRAINING
) -> tuple[int, str, dict[str, str], str]:
    """Runs the training, on two ranks that must end alike.

    Returns its steps, a checksum of its parameters, the settings in use at the end, and the standard error.
    """
    script = folder / "training.py"
    script.write_text(program)
    done = run(folder, *options, sys.executable, script, str(most_steps), *TUNED)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = re.findall(r"END \d (.*)", done.stdout)
    assert first == second
    steps, bits, *values = first.split()
    return int(steps), bits, dict(zip(TUNED, values, strict=True)), " ".join(done.stderr.split())


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# The four gradients of TRAINING have 256 KiB.
LEFT_OUT = [
    "hand_over=early: the gradients of a step are too few to be handed over in parts",
    "hand_over=late: the gradients of a step are too few to be handed over in parts",
    "fusion_threshold=4194304: a step has fewer bytes than both values",
    "report_bytes=16777216: a step has fewer bytes than both values",
]


@pytest.mark.exhaustive  # the next test shares its steps, without the choice
def test_a_job_with_tiny_chunks_ends_with_larger_ones(tmp_path: Path) -> None:
    log = tmp_path / "tuning.csv"
    options = ("--chunk-bytes", "4K", "--autotune", "--autotune-log", str(log))
    steps, bits, in_use, said = train(tmp_path, 0, *options)
    assert int(in_use["chunk_bytes"]) >= 128 << 10
    assert said.count("autotune has tried") == 1

    rows = rows_of(log)
    assert list(rows[0]) == ["step", "purpose", *TUNED, "step_seconds", "verdict"]
    assert rows[0]["chunk_bytes"] == "4096"
    assert rows[0]["step"] == "10"
    assert rows[0]["purpose"].startswith("model: 256 KiB in ")
    assert f"The first steps exchanged {rows[0]['purpose'].removeprefix('model: ')}. " in said
    left_out = [row for row in rows if row["verdict"] == "left out"]
    assert [row["purpose"] for row in left_out] == LEFT_OUT
    assert f"{len(LEFT_OUT)} changes were left out: " in said
    rows = [row for row in rows if row not in left_out]
    assert {name: rows[-1][name] for name in TUNED} == in_use
    for name, value in in_use.items():
        before = rows[0][name] if name != "hand_over" else "auto"
        assert (f"Kept {name}={value} (before: {before}): steps took " in said) == (value != before)
        assert (f"--{name.replace('_', '-')} {value}" in said) == (value != before)
    assert [row["verdict"] for row in rows] == [""] * (len(rows) - 1) + ["kept"]
    assert all(float(row["step_seconds"]) > 0 for row in rows[:-1])

    again = train(tmp_path, steps, "--autotune-load", str(log))
    assert again[:3] == (steps, bits, in_use)  # without autotune: the same bits
    assert "autotune" not in again[3]


def test_without_checks_of_parameters_the_model_is_the_same(tmp_path: Path) -> None:
    log = tmp_path / "tuning.csv"
    options = ("--check-parameters", "0", "--chunk-bytes", "4K", "--autotune", "--autotune-log", str(log))
    train(tmp_path, STEPS, *options)
    assert [row["purpose"] for row in rows_of(log) if row["verdict"] == "left out"] == LEFT_OUT


@pytest.mark.parametrize(
    ("module", "program"), [("optax", JAX), pytest.param("keras", KERAS, marks=pytest.mark.exhaustive)]
)
def test_eager_steps_of_other_frameworks_are_measured(module: str, program: str, tmp_path: Path) -> None:
    pytest.importorskip(module)
    log = tmp_path / "tuning.csv"
    options = ("--autotune", "--autotune-log", str(log))
    done = run(tmp_path, *options, sys.executable, "-c", program, KERAS_BACKEND="torch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "autotune has tried" in " ".join(done.stderr.split())
    rows = [row for row in rows_of(log) if row["verdict"] != "left out"]
    assert [row["step"] for row in rows] == ["10", "16", "22", "24"]
    assert [row["verdict"] for row in rows] == ["", "", "", "kept"]
    assert {row["hand_over"] for row in rows} == {rows[0]["hand_over"]}  # it has no meaning there


def test_two_worlds_of_a_process_have_one_log(tmp_path: Path) -> None:
    log = tmp_path / "tuning.csv"
    log.write_text("of an earlier job\n")
    done = run(tmp_path, "--autotune", "--autotune-log", str(log), sys.executable, "-c", TWO_WORLDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in rows_of(log)] == ["16", "22", "24"] * 2
    assert [row["verdict"] for row in rows_of(log)] == ["", "", "kept"] * 2


def test_steps_inside_a_compiled_program_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    log = tmp_path / "tuning.csv"
    program = JAX.replace("def step(", "@jax.jit\ndef step(").replace(f"range({STEPS})", "range(80)")
    done = run(tmp_path, "--autotune", "--autotune-log", str(log), sys.executable, "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "autotune has tried" in " ".join(done.stderr.split())
    rows = rows_of(log)
    assert not [row for row in rows if row["verdict"] == "left out"]  # there is no model of such a program
    assert [row["verdict"] for row in rows] == [""] * (len(rows) - 1) + ["kept"]
    ends = [int(row["step"]) for row in rows[:-1]]
    assert 16 <= ends[0] < ends[-1] <= 80
    assert all(later - end >= 6 for end, later in itertools.pairwise(ends))


@pytest.mark.exhaustive
def test_a_compiled_program_without_fusion_ends_with_it(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    log = tmp_path / "tuning.csv"
    options = ("--fusion-threshold", "0", "--autotune", "--autotune-log", str(log))
    programs, bits, in_use, said = train(tmp_path, 0, *options, program=COMPILED)
    assert int(in_use["fusion_threshold"]) >= 4 << 20
    assert said.count("autotune has tried") == 1
    assert f"Kept fusion_threshold={in_use['fusion_threshold']} (before: 0): steps took " in said
    assert f"--fusion-threshold {in_use['fusion_threshold']}" in said
    rows = rows_of(log)
    assert {name: rows[-1][name] for name in TUNED} == {**in_use, "chunk_bytes": rows[-1]["chunk_bytes"]}
    assert 0 < int(rows[-1]["step"]) <= programs  # those of one optimizer
    again = train(tmp_path, programs, "--autotune-load", str(log), program=COMPILED)
    assert again[:2] == (programs, bits)
    assert again[2]["fusion_threshold"] == in_use["fusion_threshold"]


def test_steps_of_a_program_that_outlives_a_world_are_measured_in_both(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    log = tmp_path / "tuning.csv"
    setup, loop, body = JAX.replace("def step(", "@jax.jit\ndef step(").partition(f"for _ in range({STEPS}):")
    end = "jax.block_until_ready(parameters)\nhvd.shutdown()\n"
    program = f"{setup}{loop}{body}{end}hvd.init()\n{loop}{body}{end}"
    done = run(tmp_path, "--autotune", "--autotune-log", str(log), sys.executable, "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " ".join(done.stderr.split()).count("autotune has tried") == 2
    assert [row["step"] for row in rows_of(log) if row["verdict"] == "kept"] == [str(STEPS)] * 2


def test_a_job_without_an_optimizer_says_that_nothing_is_tuned(tmp_path: Path) -> None:
    done = run(tmp_path, "--autotune", *REDUCTION)
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stderr.split()).count("autotune has measured nothing, and changed nothing: no ") == 1


def test_a_log_that_cannot_be_written_ends_the_job_at_once(tmp_path: Path) -> None:
    path = tmp_path / "none" / "tuning.csv"
    done = run(tmp_path, "--autotune", "--autotune-log", path, *REDUCTION)
    assert done.returncode == 1
    assert f"autotune_log: cannot write {path}: No such file or directory" in done.stderr
