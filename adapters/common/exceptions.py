"""The exceptions that users meet, where Horovod's users look for them."""

from __future__ import annotations

from sirtaki._core.errors import (
    AbortedError,
    DeadlineError,
    HorovodInternalError,
    InitializationError,
    MismatchError,
    NotInitializedError,
    ParametersDifferError,
    PeerFinishedError,
    PeerLostError,
    UnsupportedError,
)

__all__ = [
    "AbortedError",
    "DeadlineError",
    "HorovodInternalError",
    "InitializationError",
    "MismatchError",
    "NotInitializedError",
    "ParametersDifferError",
    "PeerFinishedError",
    "PeerLostError",
    "UnsupportedError",
]
