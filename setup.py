"""Builds the core with CMake and Ninja, and maps the repository's folders onto the package `sirtaki`.

What is built lies beside the bindings: the core's shared library, the declarations that cffi reads (made from
the C header), and the version. None of it depends on the version of Python, so one wheel serves them all.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parent.resolve()
HEADERS = [ROOT / "core" / "include" / name for name in ("sirtaki.h", "sirtaki_observe.h")]
FOLDERS = {"sirtaki": "adapters", "sirtaki.bindings": "bindings", "sirtaki.runner": "runner"}
LIBRARIES = ("libsirtaki.so", "libsirtaki_tensorflow.so", "libsirtaki_xla.so", "libsirtaki_mpi.so")


def declarations(header: Path) -> str:
    """The part of a C header that is handed to cffi as it stands."""
    found = re.search(r"/\* <declarations> \*/(.*)/\* </declarations> \*/", header.read_text(), re.DOTALL)
    if found is None:
        sys.exit(f"{header} has no declarations between its marks")
    return found.group(1)


class BuildNative(Command):
    """Builds everything that does not lie in the repository as it is installed."""

    description = "build the core library and what the bindings need to open it"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib = ""
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.build_lib = self.get_finalized_command("build").build_lib

    def run(self) -> None:
        target = (
            ROOT / "bindings" if self.editable_mode else Path(self.build_lib, "sirtaki", "bindings").resolve()
        )
        target.mkdir(parents=True, exist_ok=True)
        version = self.distribution.get_version()
        (target / "_version.py").write_text(f'"""The version of this build."""\n\nVERSION = "{version}"\n')
        self.write_declarations(target / "_cdef.py")
        folder = self.compile(version)
        for library in LIBRARIES:
            self.install(next(folder.rglob(library)), target / library)

    def write_declarations(self, target: Path) -> None:
        from cffi import FFI

        ffi = FFI()
        ffi.cdef("".join(map(declarations, HEADERS)))
        ffi.set_source("sirtaki.bindings._cdef", None)
        ffi.emit_python_code(str(target))

    def compile(self, version: str) -> Path:
        cmake = shutil.which("cmake")
        if cmake is None:
            sys.exit(
                "cmake was not found; install sirtaki with pip, which brings cmake and ninja for the build"
            )
        # Always the same folder, so that the next build compiles only what changed.
        folder = ROOT / "build" / "core"
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DSIRTAKI_TESTS=OFF", f"-DSIRTAKI_VERSION={version}"]
        # Build isolation gives each build another ninja: a remembered path would soon be a dead one.
        options.append(f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}")
        for step in (
            ["-S", str(ROOT / "core"), "-B", str(folder), "-G", "Ninja", *options],
            ["--build", str(folder)],
        ):
            subprocess.run([cmake, *step], check=True)
        return folder

    def install(self, built: Path, target: Path) -> None:
        """Replaces the library as a whole: processes that have it open keep the old one."""
        fresh = target.with_suffix(".new")
        shutil.copy2(built, fresh)
        fresh.replace(target)

    def get_source_files(self) -> list[str]:
        found = [path for folder in ("core", "bindings") for path in (ROOT / folder).rglob("*")]
        suffixes = {".h", ".cc", ".inc", ".map", ".txt", ".cmake"}
        return [str(path.relative_to(ROOT)) for path in found if path.suffix in suffixes]

    def get_outputs(self) -> list[str]:
        return [
            str(Path(self.build_lib, "sirtaki", "bindings", name))
            for name in (*LIBRARIES, "_cdef.py", "_version.py")
        ]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.editable_mode:
            return {}
        return {output: str(ROOT / "bindings" / Path(output).name) for output in self.get_outputs()}


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # the wheel holds a shared library, though no extension module of Python's


def packages() -> list[str]:
    found = []
    for package, folder in FOLDERS.items():
        found += [package, *(f"{package}.{name}" for name in find_packages(folder))]
    return found


def refuse_other_systems() -> None:
    """Ends the installation on a system with another kernel than Linux's."""
    if not sys.platform.startswith("linux"):
        sys.exit(
            f"sirtaki runs on Linux only, and this is {sys.platform}: the ranks of a host meet by futexes, "
            "memory files and epoll, which other systems lack. Use WSL 2 on Windows, and a Linux container "
            "or a virtual machine on macOS"
        )


refuse_other_systems()
setup(
    packages=packages(),
    package_dir=FOLDERS,
    distclass=NativeDistribution,
    cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": Wheel},
)
