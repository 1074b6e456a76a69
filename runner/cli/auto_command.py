"""--auto: the command that runs a single-process Python script on every rank, under `sirtaki.auto`."""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sirtaki.runner.cli.command import find_program
from sirtaki.runner.launch.errors import LaunchError

HASH_SEED = "PYTHONHASHSEED"
_EXAMPLE = "for example: hvdrun --auto -np 4 python train.py"
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?t?")
_LAUNCHERS = ("accelerate", "deepspeed", "horovodrun", "hvdrun", "torchrun")
_LAUNCHER_MODULES = (
    *("accelerate.commands.launch", "deepspeed.launcher.runner", "sirtaki.runner"),
    *("torch.distributed.launch", "torch.distributed.run"),
)


@dataclass
class _Program:
    """A call of Python: its own options, and what it runs."""

    options: list[str] = field(default_factory=list)
    module: str = ""  # of -m; otherwise `arguments` begins with a script
    arguments: list[str] = field(default_factory=list)


def auto_command(command: Sequence[str], size: int, environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Returns the command with which ranks run a script under `sirtaki.auto`, and a warning ("" for none).

    Raises LaunchError if the command is no call of Python with a script or a module.
    """
    if os.path.basename(command[0]) in _LAUNCHERS:
        raise _starts_processes(os.path.basename(command[0]))
    command = _without_shebang(command, environment)
    if not _PYTHON.fullmatch(os.path.basename(command[0])):
        raise _not_python(command)
    path, warning = find_program(command, size, environment)
    program = _parse(command)
    if not program.module and os.path.basename(program.arguments[0]) in _LAUNCHERS:
        raise _starts_processes(os.path.basename(program.arguments[0]))
    if program.module in _LAUNCHER_MODULES:
        raise _starts_processes(f"python -m {program.module}")
    names = ["-m", program.module] if program.module else []
    return [path, *program.options, "-m", "sirtaki.auto", *names, *program.arguments], warning


def hash_seed(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that gives sets the same order on all ranks; {}: the user has set it."""
    if environment.get(HASH_SEED, "random") != "random":
        return {}
    return {HASH_SEED: str(secrets.randbelow(2**32))}


def _without_shebang(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Returns the command with the Python of a script's first line in front, or as it is."""
    if _PYTHON.fullmatch(os.path.basename(command[0])):
        return list(command)
    path, _ = find_program(command, 1, environment)
    try:
        with open(path, "rb") as file:
            first = file.readline(1024)
    except OSError:
        return list(command)
    words = shlex.split(os.fsdecode(first[2:])) if first.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if word not in ("-S", "--split-string")]
    if not words or not _PYTHON.fullmatch(os.path.basename(words[0])):
        return list(command)
    return [*words, path, *command[1:]]


def _parse(command: Sequence[str]) -> _Program:
    """Divides a call of Python into its own options, as Python's command line does it, and the rest."""
    program, rest = _Program(), list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest.pop(0)
        if option == "--":
            break
        program.options.append(option)
        if option == "--check-hash-based-pycs":
            program.options.append(_value(rest, option))
        elif not option.startswith("--") and _ends_options(program, option, rest):
            return program
    if not rest or rest[0] == "-":
        raise LaunchError(f"--auto runs a script, and the command names none: name its file, {_EXAMPLE}")
    program.arguments = rest
    return program


def _ends_options(program: _Program, option: str, rest: list[str]) -> bool:
    """Reads a group of single-letter options; returns whether it names the module to run (-m)."""
    for index, letter in enumerate(option[1:], 1):
        value = option[index + 1 :]
        if letter in "EI":
            raise LaunchError(
                f"--auto does not work with Python's option -{letter}, which makes Python ignore "
                f"{HASH_SEED}: the order of sets would differ between ranks. Leave it out"
            )
        if letter == "c":
            raise LaunchError(f"--auto runs a script, and not the text of -c: put it into a file, {_EXAMPLE}")
        if letter == "m":
            program.options[-1:] = [option[:index]] if index > 1 else []
            program.module = value or _value(rest, "-m")
            program.arguments = rest
            return True
        if letter in "WX":
            if not value:
                program.options.append(_value(rest, f"-{letter}"))
            return False
    return False


def _value(rest: list[str], option: str) -> str:
    if not rest:
        raise LaunchError(f"Python's option {option} lacks its value, {_EXAMPLE}")
    return rest.pop(0)


def _not_python(command: Sequence[str]) -> LaunchError:
    return LaunchError(
        f"--auto runs Python scripts, and '{command[0]}' is neither Python nor a script whose first line "
        f"names Python: begin the command with python, {_EXAMPLE}"
    )


def _starts_processes(name: str) -> LaunchError:
    return LaunchError(
        f"'{name}' starts the processes of a distributed training itself, and --auto is for a script of one "
        f"process: name that script, {_EXAMPLE}; or leave --auto out"
    )
