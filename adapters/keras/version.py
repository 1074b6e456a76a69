"""The check for the supported version of Keras."""

from __future__ import annotations

import keras


def check() -> None:
    """Raises ImportError unless this is Keras 3."""
    version = getattr(keras, "__version__", "of unknown version")
    if not version.startswith("3."):
        raise ImportError(
            f"sirtaki.keras serves Keras 3, and this is Keras {version}: pip install 'keras>=3.10'. Models "
            "of Keras 2 (tf_keras, TF_USE_LEGACY_KERAS) cannot be trained with it"
        )
