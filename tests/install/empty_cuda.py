"""Makes empty libraries with CUDA's names, so that PyPI's torch can be imported without gigabytes of CUDA.

    python tests/install/empty_cuda.py TORCH_FOLDER OUTPUT_FOLDER

torch for x86-64 is linked with CUDA's libraries. Without a GPU it only calls the function that counts
devices, but the loader requires all libraries, with every symbol in the version that torch was linked with.
Each function here returns the code for "there is no such device". Put OUTPUT_FOLDER into LD_LIBRARY_PATH.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

CUDA = re.compile(r"lib(cu|nv|nccl)")
CUDA_SYMBOL = re.compile(
    r"_*(cu|nv|nccl)[A-Z0-9]|_*(cuda|cudnn|cublas|cufft|curand|cusolver|cusparse|nvtx|nvrtc)"
)
NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE

Symbols = dict[str, dict[str, set[str]]]  # by library and version ("": none)


def build_all(torch: Path, folder: Path) -> None:
    """Makes an empty library for each of CUDA's that torch, in the folder of its package, requires."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, versions in wanted(torch / "lib").items():
        build(name, versions, folder)


def wanted(folder: Path) -> Symbols:
    """Returns the CUDA symbols that a folder's libraries need. Unversioned symbols go to every library."""
    found: Symbols = {}
    anywhere: set[str] = set()
    for path in sorted(folder.glob("*.so*")):
        with path.open("rb") as file:
            elf = ELFFile(file)
            for name in needed(elf):
                if CUDA.match(name):
                    found.setdefault(name, defaultdict(set))
            for symbol, library, version in undefined(elf):
                if CUDA.match(library):
                    found.setdefault(library, defaultdict(set))[version].add(symbol)
                elif not library and CUDA_SYMBOL.match(symbol):
                    anywhere.add(symbol)
    for versions in found.values():
        versions[""] |= anywhere - set().union(*versions.values())
    return found


def needed(elf: ELFFile) -> list[str]:
    """Returns the libraries that a library is linked with."""
    section = elf.get_section_by_name(".dynamic")
    assert isinstance(section, DynamicSection)
    return [tag.needed for tag in section.iter_tags("DT_NEEDED")]


def undefined(elf: ELFFile) -> list[tuple[str, str, str]]:
    """Returns a library's undefined symbols: name, library and version; "" without a version."""
    table = elf.get_section_by_name(".dynsym")
    indices = elf.get_section_by_name(".gnu.version")
    requirements = elf.get_section_by_name(".gnu.version_r")
    assert isinstance(table, SymbolTableSection)
    versions: dict[int, tuple[str, str]] = {}
    if isinstance(requirements, GNUVerNeedSection):
        for library, auxiliaries in requirements.iter_versions():
            versions |= {one["vna_other"]: (library.name, one.name) for one in auxiliaries}
    found = []
    for number, symbol in enumerate(table.iter_symbols()):
        if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name:
            index = indices.get_symbol(number)["ndx"] if isinstance(indices, GNUVerSymSection) else 0
            found.append((symbol.name, *versions.get(index, ("", ""))))
    return found


def build(name: str, versions: dict[str, set[str]], folder: Path) -> None:
    """Makes one empty library."""
    source, script = folder / "empty.c", folder / "empty.map"
    symbols = sorted(set().union(*versions.values()))
    source.write_text("".join(f"long {symbol}(void) {{ return {NO_DEVICE}; }}\n" for symbol in symbols))
    nodes = [f"{version} {{ global: {'; '.join(versions[version])}; }};\n" for version in versions if version]
    script.write_text("".join(nodes) or "{ global: *; };")
    command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC"]
    command += [f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"]
    subprocess.run([*command, "-o", folder / name, source], check=True)


if __name__ == "__main__":
    build_all(Path(sys.argv[1]), Path(sys.argv[2]))
