"""The table of mutants: small faults, each with the tests that must notice it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).resolve().parent / "mutants"


class TableError(Exception):
    """A row of the table does not fit the source."""


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `becomes` replaces the text `was`, which occurs once.

    `tests` is passed to pytest as arguments. A first argument that ends with `.cc` names a file of the core's
    tests instead, `tests/core/transport/links.cc`, followed by one of its cases (all, if there is none).
    `survives` is the reason why no test can detect the fault, for the few faults of that kind.
    """

    folder: str
    id: str
    file: str
    was: str
    becomes: str
    tests: str
    survives: str = ""

    @cached_property
    def selection(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.tests))

    @property
    def program(self) -> str:
        """Returns the program of the core's tests that must fail; empty if pytest's tests must."""
        first = Path(self.selection[0])
        return f"test_{first.parent.name}" if first.suffix == ".cc" else ""

    @property
    def case(self) -> str:
        """Returns the argument of the program: a case, or all cases of a file."""
        return ".".join([Path(self.selection[0]).stem, *self.selection[1:]])

    @property
    def is_native(self) -> bool:
        return self.file.startswith("core/")

    def mutated(self) -> str:
        """Returns the text of the file with the fault. Raises TableError if the row does not fit."""
        text = (ROOT / self.file).read_text()
        if (count := text.count(self.was)) != 1:
            raise TableError(f"{self.id}: {self.file} has {count} places that read {self.was!r}, not one")
        return text.replace(self.was, self.becomes)


def load() -> list[Mutant]:
    """Returns all mutants, by folder. Raises TableError for a duplicate id."""
    found: dict[str, Mutant] = {}
    for path in sorted(TABLES.glob("*.yaml")):
        for folder, rows in yaml.safe_load(path.read_text()).items():
            for name, row in rows.items():
                if name in found:
                    raise TableError(f"{path.name}: two mutants are called {name}")
                found[name] = Mutant(folder=folder, id=name, **row)
    return list(found.values())
