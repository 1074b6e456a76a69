"""`sirtaki.keras.elastic` under the name that Horovod scripts use."""

from __future__ import annotations

from sirtaki.keras.elastic import *  # noqa: F403
from sirtaki.keras.elastic import __all__ as __all__
