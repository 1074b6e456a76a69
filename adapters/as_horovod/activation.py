"""Makes the package `horovod` of this folder the package that programs import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sirtaki.as_horovod.finder import Finder
from sirtaki.common import semantics

# The folder with a real package of this name and its metadata. It works on any path: in child processes, for
# importlib.util.find_spec and for importlib.metadata.version.
FOLDER = str(Path(__file__).parent / "packages")
MARK = "STANDS_FOR_SIRTAKI"  # an attribute of that package
_PATH = "PYTHONPATH"


def is_declined() -> bool:
    """Returns whether the user wants an installed Horovod instead."""
    return os.environ.get(semantics.VARIABLE) == "0"


def activate() -> None:
    """Makes `horovod` mean sirtaki, with Horovod's rules, in this process and its child processes.

    Raises:
        ImportError: a real Horovod has been imported.
    """
    loaded = sys.modules.get("horovod")
    if loaded is not None and not hasattr(loaded, MARK):
        raise ImportError(
            f"horovod has been imported from {getattr(loaded, '__file__', None)} already, so it cannot mean "
            "sirtaki any more: make `import sirtaki.as_horovod` the first import of the program, start it "
            "with hvdrun --as-horovod, or set SIRTAKI_AS_HOROVOD=0 to use the installed Horovod"
        )
    semantics.select_horovods()
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    folders = [path for path in os.environ.get(_PATH, "").split(os.pathsep) if path]
    if FOLDER not in folders:
        os.environ[_PATH] = os.pathsep.join([FOLDER, *folders])
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
