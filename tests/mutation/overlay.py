"""The package as it is installed, with one replaced file: the repository itself never changes."""

from __future__ import annotations

import os
import shutil
import site
import sys
import venv
from pathlib import Path

from mutants import ROOT

# The same mapping as in setup.py.
PACKAGES = {"adapters": "sirtaki", "bindings": "sirtaki/bindings", "runner": "sirtaki/runner"}
_IGNORED = shutil.ignore_patterns("__pycache__")


class Overlay:
    """A separate interpreter that imports links to the repository's files.

    Processes that a test starts with `sys.executable` import them, too, in every environment.
    """

    def __init__(self, folder: Path) -> None:
        self.package = folder / "package"
        for source, target in PACKAGES.items():
            shutil.copytree(
                ROOT / source, self.package / target, copy_function=_link, ignore=_IGNORED, dirs_exist_ok=True
            )
        venv.create(folder / "venv", symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        paths = [
            str(self.package),
            *(f"import site; site.addsitedir({one!r})" for one in site.getsitepackages()),
        ]
        packages = folder / "venv" / "lib" / version / "site-packages"
        (packages / "first.pth").write_text("\n".join(paths) + "\n")

    def put(self, file: str, text: str) -> None:
        """Replaces the contents of a Python file of the repository with `text`."""
        place = self._place(file)
        place.unlink()
        place.write_text(text)

    def put_library(self, built: Path) -> None:
        """Replaces a library of the bindings."""
        place = self.package / "sirtaki" / "bindings" / built.name
        place.unlink()
        shutil.copy2(built, place)

    def restore(self, file: str) -> None:
        """Undoes `put` and `put_library`."""
        folder = self.package / "sirtaki" / "bindings"
        for name in [path.name for path in folder.glob("*.so") if not path.is_symlink()]:
            (folder / name).unlink()
            _link(ROOT / "bindings" / name, folder / name)
        if not file.startswith("core/"):
            place = self._place(file)
            place.unlink()
            _link(ROOT / file, place)
            for compiled in (place.parent / "__pycache__").glob(f"{place.stem}.*.pyc"):
                compiled.unlink()

    def _place(self, file: str) -> Path:
        top, _, rest = file.partition("/")
        return self.package / PACKAGES[top] / rest


def _link(source: str | Path, target: str | Path) -> None:
    os.symlink(source, target)
