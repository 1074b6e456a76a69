"""`sirtaki.keras.callbacks` under the name that Horovod scripts use."""

from __future__ import annotations

from sirtaki.keras.callbacks import *  # noqa: F403
from sirtaki.keras.callbacks import __all__ as __all__
