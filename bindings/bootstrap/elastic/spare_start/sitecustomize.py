"""Makes a process that hvdrun has started as a spare wait, before Python runs the user's program.

Python imports the first module of this name on its path, at the end of its own start. That is this one in a
spare, and no other process. An installed module of this name is imported as ever.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def _import_installed(own: ModuleType, folder: str) -> Exception | None:
    """Imports the module of the same name that this module hides; returns its failure for Python to show."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    sys.path_importer_cache.pop(folder, None)
    del sys.modules[__name__]
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            return error
    except Exception as error:
        return error
    finally:
        sys.modules.setdefault(__name__, own)
    return None


def _run() -> Exception | None:
    """Starts the spare; returns the failure of the module that this module hides."""
    from sirtaki.bindings.bootstrap.elastic import spare

    folder = os.path.dirname(os.path.abspath(__file__))
    orders = spare.take_environment(folder)
    failure = _import_installed(sys.modules[__name__], folder)
    if orders is not None:
        spare.begin(orders)
    return failure


def _start() -> None:
    """Runs the spare. Its own failure must end the process: Python would go on to the user's program."""
    try:
        failure = _run()
    except BaseException as error:
        sys.stderr.write(f"sirtaki: this spare ends: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    if failure is not None:
        raise failure


if __name__ == "sitecustomize":  # and not a test's import of the package
    _start()
