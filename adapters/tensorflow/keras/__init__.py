"""`sirtaki.keras` under the name that Horovod scripts use: `import sirtaki.tensorflow.keras as hvd`.

It supports Keras 3 only, on any of its backends.
"""

from __future__ import annotations

from sirtaki.keras import *  # noqa: F403
from sirtaki.keras import __all__ as __all__
