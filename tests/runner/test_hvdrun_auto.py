"""hvdrun --auto: an unchanged script runs as `__main__` in every rank, or is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS

Run = Callable[..., subprocess.CompletedProcess[str]]

# Stands in for the part that splits trainings, so that scripts without a training end well.
SPLITTING_PART = """
import sys, types
part = types.ModuleType("sirtaki.keras.auto")
part.install = lambda: None
part.has_split = lambda: True
sys.modules["sirtaki.keras.auto"] = sys.modules["sirtaki.torch.auto"] = part
"""
IDENTITY = """
import multiprocessing, os, pickle, sys

class Local:
    pass

def work(queue):
    queue.put((__name__, "SIRTAKI_INITIALISED_BY" in os.environ and len(sys.argv)))

if __name__ == "__main__":
    import keras
    if not __package__:  # Python itself does not find the functions of a module that was run by -m
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        child = multiprocessing.get_context("spawn").Process(target=work, args=(queue,))
        child.start()
        print(queue.get()[0])
        child.join()
    print(type(pickle.loads(pickle.dumps(Local()))) is Local, Local.__module__)
    print(__name__, __file__, __spec__ and __spec__.name, __package__, type(__loader__).__name__, __doc__)
    print(sys.argv, sys.path[0], sys.modules["__main__"].Local is Local, sorted(globals()), __annotations__)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder for scripts, in which `import keras` means an empty module."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "sitecustomize.py").write_text(SPLITTING_PART)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "keras.py").write_text("")
    return tmp_path / "work"


@pytest.fixture
def auto(hvdrun: Run, folder: Path, environment: dict[str, str]) -> Run:
    """Returns a function that runs a command of two ranks with --auto in that folder."""
    path = os.pathsep.join(filter(None, (str(folder.parent / "parts"), environment.get("PYTHONPATH"))))

    def run(*command: str, ranks: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**environment, "PYTHONPATH": path, **variables}
        return hvdrun("--auto", "-np", str(ranks), *command, cwd=folder, env=env)

    return run


def lines_of(result: subprocess.CompletedProcess[str], rank: int) -> list[str]:
    return [one.partition("] ")[2] for one in result.stdout.splitlines() if one.startswith(f"[{rank}] ")]


def plain(folder: Path, environment: dict[str, str], *arguments: str) -> list[str]:
    """Returns the output of Python itself."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    "call",
    [
        ("sub/script.py", "a", "-b"),
        ("-m", "package.module", "a"),
        ("-um", "package"),
        ("-X", "dev", "sub/script.py"),
    ],
)
def test_a_script_is_main_as_in_python_itself(
    auto: Run, folder: Path, environment: dict[str, str], call: tuple[str, ...]
) -> None:
    for path in ("sub/script.py", "package/module.py", "package/__main__.py"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(IDENTITY)
    (folder / "sub" / "keras.py").write_text("")
    (folder / "package" / "__init__.py").write_text("")
    expected = plain(folder, environment, *call)
    result = auto("python", *call)
    assert result.returncode == 0, result.stderr
    assert lines_of(result, 0) == lines_of(result, 1) == expected


def test_a_script_with_a_first_line_is_run(auto: Run, folder: Path) -> None:
    script = folder / "train"
    script.write_text("#!/usr/bin/env -S python3 -u\nimport keras, sys\nprint(sys.argv[1:])\n")
    script.chmod(0o755)
    result = auto("./train", "x")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] ['x']", "[1] ['x']"]


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("sys.exit('bad')", 1), ("sys.exit(0)", 0)])
def test_a_script_ends_with_its_own_exit_code(auto: Run, folder: Path, end: str, code: int) -> None:
    (folder / "train.py").write_text(f"import keras, sys\n{end}\n")
    result = auto("python", "train.py")
    assert result.returncode == code
    assert "no training was split" not in result.stderr


def test_a_traceback_begins_with_the_script(auto: Run, folder: Path) -> None:
    (folder / "train.py").write_text("def fail():\n    raise KeyError('lost')\n\nfail()\n")
    result = auto("python", "train.py", ranks=1)
    shown = [one.removeprefix("[0] ") for one in result.stderr.splitlines()]
    start = shown.index("Traceback (most recent call last):")
    assert shown[start + 1] == f'  File "{folder}/train.py", line 4, in <module>'
    assert "KeyError: 'lost'" in shown
    assert "sirtaki/auto" not in result.stderr
    assert "no training was split" not in result.stderr


def test_a_script_with_wrong_syntax_is_shown_as_python_shows_it(auto: Run, folder: Path) -> None:
    (folder / "train.py").write_text("x = (\n")
    result = auto("python", "train.py", ranks=1)
    assert result.returncode == 1
    assert "SyntaxError: '(' was never closed" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_script_that_does_not_exist_is_named(auto: Run, folder: Path) -> None:
    result = auto("python", "none.py", ranks=1)
    assert result.returncode == 2
    assert f"can't open file '{folder}/none.py': [Errno 2] No such file or directory" in result.stderr


def test_equal_trainings_on_all_ranks_are_refused(auto: Run, folder: Path) -> None:
    (folder / "train.py").write_text("import sys\nprint('done')\nsys.exit(0)\n")
    result = auto("python", "train.py")
    assert result.returncode == 1
    assert "no training was split by hvdrun --auto, so 2 ranks have each done the whole work" in result.stderr
    assert auto("python", "train.py", ranks=1).returncode == 0


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"train.py": "import os\nimport sirtaki.torch as hvd\n"}, "train.py:2"),
        ({"train.py": "def f():\n    from horovod import torch\n"}, "train.py:2"),
        (
            {
                "train.py": "import own.loop\n",
                "own/loop.py": "from . import parts",
                "own/parts.py": "import horovod",
            },
            "own/parts.py:1",
        ),
    ],
)
def test_a_script_that_is_distributed_is_refused(
    auto: Run, folder: Path, files: dict[str, str], place: str
) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    result = auto("python", "train.py")
    assert result.returncode == 1
    assert f"{folder}/{place}: this script is distributed already" in result.stderr
    assert "run it without --auto" in result.stderr


def test_a_process_group_is_refused_where_it_is_made(auto: Run, folder: Path) -> None:
    pytest.importorskip("torch")
    text = "import torch.distributed as dist\n\ndist.init_process_group('gloo')\n"
    (folder / "train.py").write_text(text)
    result = auto("python", "train.py", ranks=1)
    assert result.returncode == 1
    assert f"UnsupportedError: {folder}/train.py:3: this script is distributed already" in result.stderr


def test_parts_are_installed_once_after_the_import_has_ended(auto: Run, folder: Path) -> None:
    (folder.parent / "parts" / "sitecustomize.py").write_text(
        SPLITTING_PART + "part.install = lambda: print('installed', sys.modules['keras'].READY)\n"
    )
    (folder / "keras.py").write_text("print('imported')\nREADY = True\n")
    text = (
        "import importlib.util\nprint(importlib.util.find_spec('keras').name)\n"
        "import keras\nimport keras\nprint(type(keras.__loader__).__name__, vars(keras.__loader__).keys())\n"
    )
    (folder / "train.py").write_text(text)
    result = auto("python", "train.py")
    assert result.returncode == 0, result.stderr
    expected = ["keras", "imported", "installed True", "SourceFileLoader dict_keys(['name', 'path'])"]
    assert lines_of(result, 0) == lines_of(result, 1) == expected


RANDOM = """
import keras, random, numpy as np
print(random.random(), np.random.rand(), np.random.default_rng().random(), np.random.default_rng(3).random())
print(list({f"key{i}" for i in range(20)}))
"""


def test_random_states_are_equal_on_all_ranks_and_new_in_each_job(auto: Run, folder: Path) -> None:
    pytest.importorskip("numpy")
    (folder / "train.py").write_text(RANDOM)
    results = [auto("python", "train.py") for _ in range(2)]
    for result in results:
        assert result.returncode == 0, result.stderr
        assert lines_of(result, 0) == lines_of(result, 1) != []
    first, second = (lines_of(result, 0)[0].split() for result in results)
    assert first[3] == second[3]  # the script's own seed
    assert not set(first[:3]) & set(second[:3])


def test_a_hash_seed_of_the_user_is_kept(auto: Run, folder: Path) -> None:
    (folder / "train.py").write_text("import keras, os\nprint(os.environ['PYTHONHASHSEED'])\n")
    result = auto("python", "train.py", PYTHONHASHSEED="11")
    assert sorted(result.stdout.splitlines()) == ["[0] 11", "[1] 11"], result.stderr


def test_own_states_differ_and_follow_the_seed_of_the_script(auto: Run, folder: Path) -> None:
    pytest.importorskip("torch")
    text = (
        "import random, torch\nprint(torch.rand(()).item() > 2)\ntorch.manual_seed(5)\nrandom.seed(5)\n"
        "import importlib; importlib.import_module('sirtaki' + '.auto.random_states').own_states()\n"
        "print(torch.rand(()).item(), random.random())\n"
    )
    (folder / "train.py").write_text(text)
    (folder / "one.py").write_text(
        "import random, torch\ntorch.manual_seed(5)\nrandom.seed(5)\n"
        "print(torch.rand(()).item(), random.random())\n"
    )
    expected = plain(folder, dict(os.environ), "one.py")
    seen = []
    for _ in range(2):
        result = auto("python", "train.py")
        assert result.returncode == 0, result.stderr
        assert lines_of(result, 0)[1:] == expected
        own, python = lines_of(result, 1)[1].split()
        assert own != expected[0].split()[0]
        assert python == expected[0].split()[1]
        seen.append(own)
    assert seen[0] == seen[1]


def test_random_numbers_that_no_seed_governs_are_named(auto: Run, folder: Path) -> None:
    (folder / "own.py").write_text("import time, random\nrandom.seed(int(time.time()))\nrandom.seed(1)\n")
    text = "import keras, os, own\nfrom random import SystemRandom\nos.urandom(1)\nSystemRandom()\n"
    (folder / "train.py").write_text(text)
    result = auto("python", "train.py")
    assert result.returncode == 0, result.stderr
    named = [
        one.partition("between ranks: ")[2] for one in result.stderr.splitlines() if "between ranks" in one
    ]
    assert [one.partition(": ")[0] for one in named] == [
        f"{folder}/train.py:3",
        f"{folder}/train.py:4",
        f"{folder}/own.py:2",
    ]


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
        "import keras, importlib, os\nhvd = importlib.import_module('sirtaki' + '.common.objects')\n"
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


def test_private_files_end_with_the_job(auto: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    text = "import keras, os\nos.makedirs('out')\nopen('out/x', 'w').write(os.environ['SIRTAKI_RANK'])\n"
    (folder / "train.py").write_text(text)
    result = auto("python", "train.py", ranks=3, TMPDIR=str(tmp_path / "temporary"))
    assert result.returncode == 0, result.stderr
    assert (folder / "out" / "x").read_text() == "0"
    assert list((tmp_path / "temporary").iterdir()) == []
