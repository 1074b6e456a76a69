"""Compares the system requirements of libsirtaki.so with those that pyproject.toml states.

    python tests/install/floor.py LIBRARY_OR_WHEEL [--glibc 2.28]

The loader rejects a library that needs a symbol in a version that the system's glibc, libgcc_s or libstdc++
does not have. [tool.sirtaki.floor] holds the newest version of each that the library may need.
"""

from __future__ import annotations

import argparse
import io
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
LIBRARY = "sirtaki/bindings/libsirtaki.so"

Version = tuple[int, ...]


def stated() -> dict[str, Version]:
    """Returns the newest permitted version, by the prefix of a symbol's version: GLIBC, GCC."""
    return {family: parse(text) for family, text in table("tool", "sirtaki", "floor").items()}


def table(*path: str) -> dict[str, Any]:
    """Returns a table of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads(PYPROJECT.read_text())
    for name in path:
        found = found[name]
    return found


def parse(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))


def wanted(library: BinaryIO) -> dict[str, Version]:
    """Returns the newest version of each family that a shared library needs."""
    section = ELFFile(library).get_section_by_name(".gnu.version_r")
    found: dict[str, Version] = {}
    if isinstance(section, GNUVerNeedSection):
        for _, versions in section.iter_versions():
            for version in versions:
                family, _, number = version.name.partition("_")
                found[family] = max(found.get(family, (0,)), parse(number))
    return found


def complaints(wanted: dict[str, Version], allowed: dict[str, Version]) -> list[str]:
    """Returns one line for each family of which too new a version is needed."""
    lines = []
    for family, version in sorted(wanted.items()):
        text = f"libsirtaki.so needs {family} {show(version)}"
        if family not in allowed:
            lines.append(f"{text}, of which pyproject.toml allows nothing")
        elif version > allowed[family]:
            lines.append(f"{text}, but is to run from {show(allowed[family])} on")
    return lines


def show(version: Version) -> str:
    return ".".join(map(str, version))


def open_library(path: Path) -> BinaryIO:
    """Opens the library, inside a wheel or as a file of its own."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return io.BytesIO(wheel.read(LIBRARY))
    return path.open("rb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--glibc", type=parse, help="instead of the version that pyproject.toml states")
    options = parser.parse_args()
    with open_library(options.path) as library:
        found = wanted(library)
    lines = complaints(found, stated() | ({"GLIBC": options.glibc} if options.glibc else {}))
    if lines:
        sys.exit("\n".join(lines))
    needs = ", ".join(f"{family} {show(version)}" for family, version in sorted(found.items()))
    print(f"{options.path} runs from {needs} on")


if __name__ == "__main__":
    main()
