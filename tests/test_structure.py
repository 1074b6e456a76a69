"""The rules of the house that a machine can see."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sirtaki._core import errors, library
from sirtaki._core.request import Batch

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core"

# Includes go down only. Control and data meet in context, and in plan, which lies below both.
BELOW = {
    "base": set(),
    "observe": {"base"},
    "plan": {"base", "observe"},
    "transport": {"base", "observe"},
    "control": {"base", "observe", "plan", "transport"},
    "data": {"base", "observe", "plan", "transport"},
    "context": {"base", "observe", "plan", "transport", "control", "data"},
    "api": {"base", "observe", "plan", "transport", "control", "data", "context"},
}
LONGEST = 600  # lines of a file
BUILDS = ("tests", "temp.*")  # folders of build/: those of make test and of an editable install
# Relocated constants and the compiler's own references are written once, by the loader.
WRITABLE = re.compile(r"\.(data(?!\.rel\.ro|\.rel\.local\.DW\.ref)|bss|tdata|tbss)")


def repository_files(*suffixes: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [ROOT / name for name in listed.splitlines() if name.endswith(suffixes) and (ROOT / name).exists()]


def test_includes_go_down_only() -> None:
    wrong = []
    for source in [*CORE.rglob("*.h"), *CORE.rglob("*.cc")]:
        folder = source.relative_to(CORE).parts[0]
        for included in re.findall(r'#include "([^"]+)"', source.read_text()):
            target = included.partition("/")[0] if "/" in included else ""
            if target in BELOW and target != folder and target not in BELOW.get(folder, set()):
                wrong.append(f"{source.relative_to(ROOT)} includes {included}")
    assert not wrong, "\n".join(wrong)


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in repository_files(".py", ".cc", ".h")}
    assert not {str(path): length for path, length in lengths.items() if length > LONGEST}


def test_the_library_exports_its_interface_only() -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library.PATH], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}
    declared = set(re.findall(r"\b(srt_\w+)\(", (CORE / "include" / "sirtaki.h").read_text()))
    assert {name for name in names if not name.startswith("srt_")} <= {
        "SIRTAKI"
    }  # the version script's own name
    assert declared <= names


def test_no_object_file_has_writable_globals() -> None:
    objects = [path for folder in BUILDS for path in (ROOT / "build").glob(f"{folder}/**/core.dir/**/*.o")]
    if not objects:
        pytest.skip("there are no object files here; make test builds them")
    wrong = []
    for path in objects:
        for line in subprocess.run(
            ["size", "-A", path], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            name, *numbers = line.split() or [""]
            if WRITABLE.match(name) and int(numbers[0]) > 0:
                wrong.append(f"{path.relative_to(ROOT)}: {numbers[0]} bytes in {name}")
    assert not wrong, "\n".join(wrong)


def test_every_failure_has_an_exception() -> None:
    kinds = {kind.name for kind in library.statuses()} - {"ok", "in_progress"}
    assert kinds == set(errors.CLASSES)
    for kind in library.statuses():
        if kind.name in errors.CLASSES:
            assert str(errors.error_of(kind.code, "what happened")) == "what happened"


def test_a_batch_is_written_where_the_core_reads_it() -> None:
    batch = Batch(3)
    for index in range(3):
        batch.describe(index, 0, 10, (index, 2), name=f"n{index}", group=(7, 3), layout=5, prescale=0.5)
        batch.point(index, 100 + index, 200 + index)
        batch.flag(index, index)
    first = [(r.input, r.output, r.flags, r.dimensions, list(r.shape[0:2])) for r in batch.requests]
    assert first == [(100 + i, 200 + i, i, 2, [i, 2]) for i in range(3)]
    batch.point_all([1, 2, 3], [4, 5, 6])
    batch.flag_all([1, 0, 1])
    assert [(r.input, r.output, r.flags) for r in batch.requests] == [(1, 4, 1), (2, 5, 0), (3, 6, 1)]
    assert [library.text(r.name) for r in batch.requests] == ["n0", "n1", "n2"]
    assert {(r.group_id, r.group_size, r.layout, r.prescale, r.dtype) for r in batch.requests} == {
        (7, 3, 5, 0.5, 10)
    }
