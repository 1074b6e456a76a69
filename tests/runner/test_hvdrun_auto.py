"""hvdrun --auto: an unchanged script runs as `__main__` in every rank, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from auto_jobs import SPLITTING_PART, lines_of, plain
from launching import Run

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
