"""The versions of pyspark that are served."""

from __future__ import annotations

from importlib import import_module

_TESTED = "4.3.0"
_MAJOR = "4"


def check_version() -> None:
    """Raises ImportError if pyspark is not installed, or is of a major version that was not tested."""
    try:
        found: str = import_module("pyspark").__version__
    except ImportError as error:
        raise ImportError(
            f"sirtaki.spark needs pyspark, which cannot be imported ({error}): pip install 'sirtaki[spark]', "
            "and a Java runtime (on Debian: apt install default-jre-headless)"
        ) from None
    if found.partition(".")[0] != _MAJOR:
        raise ImportError(
            f"sirtaki.spark serves pyspark {_MAJOR} (tested: {_TESTED}), and this is pyspark {found}: "
            "pip install 'sirtaki[spark]', with a cluster of the same version"
        )
