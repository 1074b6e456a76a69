"""The check for the served version of a library that starts ranks."""

from __future__ import annotations

from importlib import import_module


def check_version(adapter: str, library: str, tested: str, also_needed: str = "") -> None:
    """Raises ImportError if a library is missing, or its major version differs from the tested version.

    Args:
        adapter: the name of the adapter, and of the extra that installs the library.
        library: the module of the library.
        tested: the version that was tested.
        also_needed: what the library needs besides, for the error.
    """
    major = tested.partition(".")[0]
    try:
        found: str = import_module(library).__version__
    except ImportError as error:
        raise ImportError(
            f"sirtaki.{adapter} needs {library}, which cannot be imported ({error}): "
            f"pip install 'sirtaki[{adapter}]'{also_needed}"
        ) from None
    if found.partition(".")[0] != major:
        raise ImportError(
            f"sirtaki.{adapter} serves {library} {major} (tested: {tested}), and this is {library} {found}: "
            f"pip install 'sirtaki[{adapter}]', with a cluster of the same version"
        )
