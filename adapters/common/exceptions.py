"""The exceptions that users meet, in the module where Horovod's users look for them."""

from __future__ import annotations

from sirtaki.bindings.errors import (
    AbortedError,
    DeadlineError,
    DeviceError,
    ForkedError,
    HorovodInternalError,
    InitializationError,
    InternalError,
    MismatchError,
    NotInitializedError,
    OutOfMemoryError,
    ParametersDifferError,
    PeerFinishedError,
    PeerLostError,
    ProtocolError,
    ShutDownError,
    SystemRefusedError,
    UnsupportedError,
)

__all__ = ["AbortedError", "DeadlineError", "DeviceError", "ForkedError", "HorovodInternalError"]
__all__ += ["InitializationError", "InternalError", "MismatchError", "NotInitializedError"]
__all__ += ["OutOfMemoryError", "ParametersDifferError", "PeerFinishedError", "PeerLostError"]
__all__ += ["ProtocolError", "ShutDownError", "SystemRefusedError", "UnsupportedError"]
