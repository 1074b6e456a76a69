"""Commands that can run as spares: commands run by Python itself.

A spare is started with the user's own command. Python calls `sitecustomize` before it runs the program, and
that is where the spare waits; a command in which it would not be called would run the program at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from sirtaki.runner.launch.errors import LaunchError

_INTERPRETER = re.compile(r"python(3(\.\d+)?)?t?")
_WITH_VALUE = "WX"  # the value follows, in the same argument or the next one
_ENDS_OPTIONS = "cm"  # the program follows
_LONG_WITH_VALUE = "--check-hash-based-pycs"
# Options with which Python does not call the spare's code, or would not run the program as a rank does.
_EXCLUDED = {
    "E": "ignores PYTHONPATH",
    "I": "ignores PYTHONPATH",
    "S": "leaves out the module site",
    "i": "waits for input after the program",
}
_SHEBANG_BYTES = 256
_EXAMPLE = "for example: hvdrun -np 4 --min-np 2 --spares 1 python train.py"


def check_spare_command(command: Sequence[str]) -> None:
    """Raises LaunchError, with the reason, if a process of this command cannot be a spare."""
    if reason := why_no_spare(command):
        raise LaunchError(f"--spares needs a command that Python runs, but {reason}; {_EXAMPLE}")


def why_no_spare(command: Sequence[str]) -> str:
    """Returns why processes of this command, which begins with a path, cannot be spares; "" if they can."""
    name = os.path.basename(command[0])
    if _INTERPRETER.fullmatch(name):
        return _why_not_with(command[1:])
    interpreter = _interpreter_of(command[0])
    if not interpreter or not _INTERPRETER.fullmatch(os.path.basename(interpreter[0])):
        return f"'{name}' is not Python"
    return _why_not_with([*interpreter[1:], command[0]])


def _why_not_with(arguments: Sequence[str]) -> str:
    """Returns why Python does not call a spare's code with these arguments; "" if it does."""
    values = iter(arguments)
    for argument in values:
        if argument == "-":
            return "'python -' reads the program from standard input, which no rank has"
        if not argument.startswith("-"):
            return ""
        if argument == _LONG_WITH_VALUE:
            next(values, None)
        elif argument.startswith("--"):
            return f"'python {argument}' runs no program"
        else:
            for place, letter in enumerate(argument[1:], 1):
                if letter in _EXCLUDED:
                    return f"Python's option -{letter} {_EXCLUDED[letter]}"
                if letter in "hV?":
                    return f"'python {argument}' runs no program"
                if letter in _ENDS_OPTIONS:
                    return ""
                if letter in _WITH_VALUE:
                    if place == len(argument) - 1:
                        next(values, None)
                    break
    return "it names no program"


def _interpreter_of(path: str) -> list[str]:
    """Returns the interpreter of a script and its option, by the script's first line; [] if there is none."""
    try:
        with open(path, "rb") as file:
            first = file.read(_SHEBANG_BYTES).split(b"\n")[0]
    except OSError:
        return []
    if not first.startswith(b"#!"):
        return []
    words = os.fsdecode(first[2:]).split(maxsplit=1)
    if words and os.path.basename(words[0]) == "env":
        words = words[1].split() if len(words) > 1 else []
        return words[:1] if len(words) == 1 else []  # a variable or an option of env may follow
    return words
