"""Data-parallel training with Horovod's calls.

Import the part for your library, for example `import sirtaki.torch as hvd`. This package itself imports none.
"""

from __future__ import annotations

from sirtaki.bindings._version import VERSION as __version__

__all__ = ["__version__"]
