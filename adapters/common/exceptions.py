"""The exceptions that users meet, in the module where Horovod's users look for them."""

from __future__ import annotations

from sirtaki.bindings.errors import (
    AbortedError,
    BatchSkippedError,
    DeadlineError,
    DeviceError,
    ForkedError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InitializationError,
    InternalError,
    MismatchError,
    NotFiniteError,
    NotInitializedError,
    OutOfMemoryError,
    ParametersDifferError,
    PeerFinishedError,
    PeerLostError,
    ProtocolError,
    ResultsDifferError,
    ShutDownError,
    SystemRefusedError,
    UnsupportedError,
)

__all__ = [
    "AbortedError",
    "BatchSkippedError",
    "DeadlineError",
    "DeviceError",
    "ForkedError",
    "HorovodInternalError",
]
__all__ += ["HostsUpdatedInterrupt", "InitializationError", "InternalError", "MismatchError"]
__all__ += ["NotFiniteError"]
__all__ += ["NotInitializedError", "OutOfMemoryError", "ParametersDifferError", "PeerFinishedError"]
__all__ += [
    "PeerLostError",
    "ProtocolError",
    "ResultsDifferError",
    "ShutDownError",
    "SystemRefusedError",
    "UnsupportedError",
]
