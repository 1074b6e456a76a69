"""hvdrun --auto: the command of the ranks, and the commands that are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import Run

from sirtaki.runner.cli.auto_command import auto_command, hash_seed
from sirtaki.runner.launch.errors import LaunchError


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py --lr 1 -m", "-m sirtaki.auto train.py --lr 1 -m"),
        ("-u -W ignore -Xdev train.py", "-u -W ignore -Xdev -m sirtaki.auto train.py"),
        ("-BX dev -- -odd.py", "-BX dev -m sirtaki.auto -odd.py"),
        (
            "--check-hash-based-pycs always train.py",
            "--check-hash-based-pycs always -m sirtaki.auto train.py",
        ),
        ("-m my.module -u", "-m sirtaki.auto -m my.module -u"),
        ("-Oummy.module x", "-Ou -m sirtaki.auto -m my.module x"),
        ("-um my.module", "-u -m sirtaki.auto -m my.module"),
    ],
)
def test_the_options_of_python_stay_in_front(command: str, expected: str) -> None:
    found, warning = auto_command([sys.executable, *command.split()], 2, {})
    assert (found, warning) == ([sys.executable, *expected.split()], "")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["python"], "the command names none"),
        (["python", "-u", "-"], "the command names none"),
        (["python", "--version"], "the command names none"),
        (["python", "-c", "print()"], "not the text of -c"),
        (["python", "-uE", "train.py"], "option -E"),
        (["python", "-I", "train.py"], "option -I"),
        (["python", "-W"], "-W lacks its value"),
        (["python", "-m"], "-m lacks its value"),
        (["true", "train.py"], "'true' is neither Python nor a script"),
        (["torchrun", "train.py"], "'torchrun' starts the processes of a distributed training itself"),
        (["python", "-m", "torch.distributed.run", "train.py"], "'python -m torch.distributed.run' starts"),
        (["python", "/usr/bin/accelerate", "launch"], "'accelerate' starts"),
        (["./none.py"], "there is no file './none.py'"),
    ],
)
def test_other_commands_are_refused(command: list[str], reason: str) -> None:
    with pytest.raises(LaunchError) as raised:
        auto_command(command, 2, {"PATH": "/usr/bin:/bin"})
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    "line", ["#!/usr/bin/env python3", "#! /usr/bin/env -S python3 -u", "#!/x/python3.12 -u"]
)
def test_a_script_names_its_python_in_its_first_line(tmp_path: Path, line: str) -> None:
    script = tmp_path / "train"
    script.write_text(f"{line}\n")
    script.chmod(0o755)
    if "/x/" in line:
        with pytest.raises(LaunchError, match=r"/x/python3\.12"):
            auto_command([str(script)], 1, {})
        return
    found, _ = auto_command([str(script), "a"], 1, {})
    options = ["-u"] if line.endswith("-u") else []
    assert found[1:] == [*options, "-m", "sirtaki.auto", str(script), "a"]
    assert Path(found[0]).parent == Path(sys.executable).parent


def test_hashes_are_made_equal_unless_the_user_has_chosen() -> None:
    assert hash_seed({"PYTHONHASHSEED": "5"}) == {}
    for environment in ({}, {"PYTHONHASHSEED": "random"}):
        assert 0 <= int(hash_seed(environment)["PYTHONHASHSEED"]) < 2**32


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--min-np", "1"), "its ranks stay"),
        (("--as-horovod",), "for scripts that are distributed already"),
        (("--torch-env",), "trainers distribute the training themselves"),
    ],
)
def test_options_that_exclude_it_are_named(hvdrun: Run, options: tuple[str, ...], reason: str) -> None:
    result = hvdrun("-np", "2", "--auto", *options, "python", "train.py")
    assert result.returncode != 0
    assert "--auto cannot be used with" in result.stderr
    assert reason in result.stderr


def test_a_dry_run_shows_the_command_and_the_seed(hvdrun: Run) -> None:
    result = hvdrun("-np", "2", "--auto", "--dry-run", "python", "-u", "train.py", "x")
    lines = result.stdout.splitlines()
    assert any(
        one.startswith("command: ") and one.endswith(" -u -m sirtaki.auto train.py x") for one in lines
    )
    assert any(one.startswith("setting: PYTHONHASHSEED=") for one in lines)
