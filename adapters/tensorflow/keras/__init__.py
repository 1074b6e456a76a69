"""`sirtaki.keras` under the name that scripts for Horovod know: `import sirtaki.tensorflow.keras as hvd`.

It serves Keras 3 only, and whatever backend that runs on.
"""

from __future__ import annotations

from sirtaki.keras import *  # noqa: F403
from sirtaki.keras import __all__ as __all__
