"""hvdrun --auto: rank 0 prepares the data and writes the files, and other ranks have files of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from auto_jobs import lines_of, plain
from launching import Hosts, Run

PREPARING = """
import keras, os, subprocess
made = not os.path.exists("cache/data.txt")
if made:
    os.makedirs("cache")
    with open("cache/data.txt", "w") as file:
        for number in range(20000):
            file.write(f"{number}\\n")
            file.flush()
os.mkdir("results")
seen = subprocess.run(["cat", "results/x"], capture_output=True).stdout
print(made, len(open("cache/data.txt").readlines()), seen)
with open("results/x", "x") as file:
    file.write(os.environ["SIRTAKI_RANK"])
print(open("results/x").read(), os.listdir("results"))
"""


def test_rank_0_prepares_the_data_first(auto: Run, folder: Path) -> None:
    (folder / "train.py").write_text(PREPARING)
    result = auto("python", "train.py")
    assert result.returncode == 0, result.stderr
    assert lines_of(result, 0) == ["True 20000 b''", "0 ['x']"]
    assert lines_of(result, 1) == ["False 20000 b'0'", "1 ['x']"]
    assert (folder / "results" / "x").read_text() == "0"


def test_an_exchange_of_rank_0_lets_the_others_go_on(auto: Run, folder: Path) -> None:
    text = (
        "import keras, importlib, os\nhvd = importlib.import_module('sirtaki' + '.common.ops.objects')\n"
        "if os.environ['SIRTAKI_RANK'] == '0':\n    open('ready', 'w').write('1')\n"
        "else:\n    print(open('ready').read())\nprint(hvd.allgather_object(len(os.listdir('.'))))\n"
    )
    (folder / "train.py").write_text(text)
    result = auto("python", "train.py")
    assert result.returncode == 0, result.stderr
    assert lines_of(result, 1) == ["1", *lines_of(result, 0)]


def snapshot(folder: Path) -> dict[str, object]:
    """Returns all names below a folder with their contents and times of change."""
    found = sorted(folder.rglob("*"))
    return {
        str(one.relative_to(folder)): (
            one.lstat().st_mode,
            one.lstat().st_ctime_ns,
            one.is_file() and one.read_bytes(),
        )
        for one in found
    }


def test_a_rank_above_0_sees_its_own_files_and_changes_none_of_the_host(
    auto: Run, folder: Path, environment: dict[str, str]
) -> None:
    script = (Path(__file__).parent / "auto_file_operations.py").read_text()
    for top in (folder, folder.parent / "plain"):
        (top / "old" / "deep" / "inner").mkdir(parents=True)
        (top / "keras.py").write_text("")
        (top / "train.py").write_text(script)
        for name in ("a.txt", "b.txt", "c.txt", "deep/d.txt", "deep/inner/e.txt"):
            (top / "old" / name).write_text(name)
        (top / "link").symlink_to("old")
    expected = plain(folder.parent / "plain", environment, "train.py")
    before = snapshot(folder)
    result = auto("python", "train.py", PYTHONDONTWRITEBYTECODE="1")
    assert result.returncode == 0, result.stderr
    assert lines_of(result, 1) == expected
    assert snapshot(folder) == before


UNCOVERED = """
import io, os, posix, keras
calls = {
    "link": lambda: os.link("train.py", "linked"),
    "FileIO": lambda: io.FileIO("train.py", "r+"),
    "unlink": lambda: posix.unlink("old.txt"),
    "rename": lambda: posix.rename("old.txt", "new.txt"),
    "replace": lambda: posix.rename("/dev/null", "old.txt"),
}
if os.environ["SIRTAKI_RANK"] == "1":
    for name, call in calls.items():
        try:
            print(name, call())
        except NotImplementedError as error:
            print(name, error)
"""


def test_changes_by_other_functions_are_refused_by_line(auto: Run, folder: Path) -> None:
    (folder / "old.txt").write_text("old")
    (folder / "train.py").write_text(UNCOVERED)
    before = snapshot(folder)
    result = auto("python", "train.py", PYTHONDONTWRITEBYTECODE="1")
    assert result.returncode == 0, result.stderr
    expected = [("link", 4), ("FileIO", 5), ("unlink", 6), ("rename", 7), ("replace", 8)]
    for line, (name, number) in zip(lines_of(result, 1), expected, strict=True):
        assert line.startswith(f"{name} {folder}/train.py:{number}: ")
        assert "only rank 0 may change files of the host" in line
    assert snapshot(folder) == before


RENAMED = """
import os, keras
os.mkdir("step.tmp")
with open("step.tmp/rank", "w") as file:
    file.write(os.environ["SIRTAKI_RANK"])
os.rename("step.tmp", "step")
print(os.listdir("step"), open("step/rank").read(), os.path.exists("step.tmp"))
os.remove("step/rank")
os.rmdir("step")
print(os.path.exists("step"), "step" in os.listdir())
if os.environ["SIRTAKI_RANK"] == "0":
    os.makedirs("step/of rank 0")
"""


def test_folders_of_rank_0_are_no_obstacle(auto: Run, folder: Path) -> None:
    """Rank 0 has made the folder in whose place another rank moves its own."""
    (folder / "train.py").write_text(RENAMED)
    result = auto("python", "train.py")
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert lines_of(result, rank) == [f"['rank'] {rank} False", "False False"]


def test_ranks_of_several_hosts_agree(
    hvdrun: Run, hosts: Hosts, folder: Path, environment: dict[str, str]
) -> None:
    hosts(hostB={})
    path = os.pathsep.join(filter(None, (str(folder.parent / "parts"), environment.get("PYTHONPATH"))))
    text = "import keras, os, random\nopen('x', 'w').write(os.environ['SIRTAKI_RANK'])\n"
    (folder / "train.py").write_text(text + "print(random.random(), hash('x'), open('x').read())\n")
    command = ("--auto", "-H", "localhost:1,hostB:2", sys.executable, "train.py")
    result = hvdrun(*command, cwd=folder, env={**environment, "PYTHONPATH": path})
    assert result.returncode == 0, result.stderr
    seen = [lines_of(result, rank)[0].split() for rank in range(3)]
    assert [one[2] for one in seen] == ["0", "1", "2"]
    assert len({tuple(one[:2]) for one in seen}) == 1
    assert (folder / "x").read_text() == "0"


def test_a_forked_child_of_the_script_ends_as_it_does(auto: Run, folder: Path) -> None:
    text = (
        "import keras, os\nchild = os.fork()\nif child:\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "else:\n    open('child', 'w').close()\n"
    )
    (folder / "train.py").write_text(text)
    result = auto("python", "train.py")
    assert result.returncode == 0, result.stderr
    assert lines_of(result, 0) == lines_of(result, 1) == ["0"]


def test_a_module_of_the_script_waits_for_rank_0(auto: Run, folder: Path) -> None:
    (folder / "data.py").write_text(
        "import os\nmade = not os.path.exists('data.txt')\nif made:\n    open('data.txt', 'w').write('all')\n"
        "text = open('data.txt').read()\n"
    )
    (folder / "train.py").write_text("import data, keras\nprint(data.made, data.text)\n")
    result = auto("python", "train.py")
    assert result.returncode == 0, result.stderr
    assert (lines_of(result, 0), lines_of(result, 1)) == (["True all"], ["False all"])


NATIVE = """
import os, torch, h5py, numpy as np
from pathlib import Path
from safetensors.torch import load_file, save_file
rank = int(os.environ["SIRTAKI_RANK"])
own = torch.tensor([float(rank)])
torch.save({"own": own}, Path("model.pt"))
save_file({"own": own}, "model.safetensors")
with h5py.File("model.h5", "w") as file:
    file["own"] = np.array([rank])
with h5py.File("model.h5", mode="a") as file:
    file["more"] = np.array([rank + 10])
torch.save(own, f="old.pt")
np.save("own.npy", own.numpy())
with h5py.File("model.h5") as file:
    print(int(file["own"][0]), int(file["more"][0]))
print(torch.load("model.pt")["own"], torch.load("model.pt", mmap=True)["own"], torch.load(f="old.pt"))
print(load_file("model.safetensors")["own"], np.load("own.npy", mmap_mode="r"))
"""


def test_native_writers_have_private_files(auto: Run, folder: Path) -> None:
    for library in ("torch", "h5py", "safetensors"):
        pytest.importorskip(library)
    (folder / "train.py").write_text(NATIVE)
    result = auto("python", "train.py")
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        own = f"tensor([{rank}.])"
        expected = [f"{rank} {rank + 10}", f"{own} {own} {own}", f"{own} [{rank}.]"]
        assert lines_of(result, rank) == expected
    import torch

    assert torch.load(folder / "model.pt") == {"own": torch.tensor([0.0])}


ENDING = """
import keras, os
os.makedirs('out')
open('out/x', 'w').write(os.environ['SIRTAKI_RANK'])
own = os.path.join(os.path.dirname(os.environ['SIRTAKI_KEY_FILE']), 'rank1')
if os.environ['SIRTAKI_RANK'] == '1':
    print(oct(os.stat(own).st_mode), os.listdir(own) != [])
"""


def test_private_files_belong_to_the_user_and_end_with_the_job(
    auto: Run, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "temporary").mkdir()
    (folder / "train.py").write_text(ENDING)
    result = auto("python", "train.py", ranks=3, TMPDIR=str(tmp_path / "temporary"))
    assert result.returncode == 0, result.stderr
    assert lines_of(result, 1) == ["0o40700 True"]
    assert (folder / "out" / "x").read_text() == "0"
    assert list((tmp_path / "temporary").iterdir()) == []
