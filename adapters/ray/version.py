"""The versions of Ray that are served."""

from __future__ import annotations

from importlib import import_module

_TESTED = "2.60.0"
_MAJOR = "2"


def check_version() -> None:
    """Raises ImportError if Ray is not installed, or is of a major version that was not tested."""
    try:
        found: str = import_module("ray").__version__
    except ImportError as error:
        raise ImportError(
            f"sirtaki.ray needs Ray, which cannot be imported ({error}): pip install 'sirtaki[ray]'"
        ) from None
    if found.partition(".")[0] != _MAJOR:
        raise ImportError(
            f"sirtaki.ray serves Ray {_MAJOR} (tested: {_TESTED}), and this is ray {found}: "
            "pip install 'sirtaki[ray]', with a cluster of the same version"
        )
