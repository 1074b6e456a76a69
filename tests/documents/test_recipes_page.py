"""The recipes: programs run on two ranks, and commands name options that exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from process_world import PATIENCE, free_address, hvdrun

from .pages import output_of, path_of, programs_of

torch = pytest.importorskip("torch")

TEXT = path_of("recipes.md").read_text()
TENSORBOARD, WANDB, LORA, MODAL = programs_of("recipes.md")
# TensorBoard and peft use TensorFlow where it is installed, whose import takes longer than the programs.
NO_TENSORFLOW = 'raise ImportError("not in this test")'
WANDB_STAND_IN = """
import json, os

class Run:
    def __init__(self, **options):
        self.record = {"options": options, "logged": []}

    def log(self, values, step):
        self.record["logged"].append(step)

    def finish(self):
        with open(f"run-{os.getpid()}.json", "w") as file:
            json.dump(self.record, file)

init = Run
"""
# The bytes of all exchanges, and a training of this process alone, after the beginning of the program.
ALONE = """
adapters = trainable
exchanged = [entry["bytes"] for entry in hvd.stats()["by_backend"] if entry["kind"] == "all-reduce"]
frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
hvd.shutdown()
{beginning}
optimizer = torch.optim.AdamW(filter(lambda parameter: parameter.requires_grad, model.parameters()), lr=0.01)
for inputs, labels in torch.utils.data.DataLoader(data, batch_size=16):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
for name, parameter in adapters.items():
    torch.testing.assert_close(parameter, model.get_parameter(name), rtol=1e-4, atol=1e-6)
assert 0 < sum(exchanged) < 10 * 4 * frozen / 4, exchanged  # in 10 steps
print("AS ONE PROCESS")
"""


def block(language: str) -> str:
    """Returns the first block of a language on the page."""
    found = re.search(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_one_rank_writes_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="make test-full installs it")
    (tmp_path / "tensorflow.py").write_text(NO_TENSORFLOW)
    output_of(TENSORBOARD, 2, tmp_path)
    monkeypatch.setitem(
        sys.modules, "tensorboard.compat.notf", ModuleType("notf")
    )  # its own stand-in for TensorFlow
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (events,) = (tmp_path / "runs").iterdir()
    logged = [
        (event.step, value.tag)
        for event in EventFileLoader(str(events)).Load()
        for value in event.summary.value
    ]
    assert logged == [(step, "loss") for step in range(10)]


def test_a_job_is_one_run_of_wandb(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB_STAND_IN)
    output_of(WANDB, 2, tmp_path)
    (run,) = [json.loads(path.read_text()) for path in tmp_path.glob("run-*.json")]
    assert run == {"options": {"project": "digits", "mode": "offline"}, "logged": list(range(10))}


def test_adapters_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="make test-full installs it")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "tensorflow.py").write_text(NO_TENSORFLOW)
    beginning = LORA.partition("hvd.init()\n")[2].partition("hvd.broadcast")[0]
    printed = output_of(LORA + ALONE.format(beginning=beginning), 2, tmp_path)
    assert printed.count("AS ONE PROCESS") == 2
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_the_task_of_skypilot_joins_two_nodes(tmp_path: Path) -> None:
    task = yaml.safe_load(block("yaml"))
    port = free_address().partition(":")[2]
    script = task["run"].replace("--nproc-per-node 4", "--nproc-per-node 1").replace("29500", port)
    assert script.count(port) == script.count("--nproc-per-node 1") == 1
    (tmp_path / "train.py").write_text("import sirtaki.torch as hvd\nhvd.init()\nprint(hvd.size())\n")
    environment = {
        **os.environ,
        **dict.fromkeys(task["secrets"], "5e" * 32),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
    }
    nodes = [
        subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env={**environment, "SKYPILOT_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [node.communicate(timeout=PATIENCE)[0] for node in nodes] == ["2\n"] * 2


def test_the_file_for_modal_compiles_and_options_exist() -> None:
    compile(MODAL, "modal", "exec")
    help_text = subprocess.run(hvdrun(1, "--help"), capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", help_text))
    calls = re.findall(r"\bhvdrun\b(.*?)\bpython\b", TEXT)
    assert len(calls) >= 5
    used = {option for call in calls for option in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", call)}
    assert used
    assert used <= known


def test_ranks_meet_in_the_namespaces_of_a_container(tmp_path: Path) -> None:
    namespaces = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--ipc", "--uts"]
    if subprocess.run([*namespaces, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system lets the user create no namespaces")
    program = Path(__file__).parents[1] / "install" / "sum_over_ranks.py"
    command = [*namespaces, *hvdrun(2, sys.executable, program, "numpy")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the sum over 2 ranks is right") == 2
