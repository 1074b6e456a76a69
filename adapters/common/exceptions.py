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

__all__ = ["AbortedError", "BatchSkippedError", "DeadlineError", "DeviceError"]
__all__ += ["ForkedError", "HorovodInternalError", "HostsUpdatedInterrupt", "InitializationError"]
__all__ += ["InternalError", "MismatchError", "NotFiniteError", "NotInitializedError"]
__all__ += ["OutOfMemoryError", "ParametersDifferError", "PeerFinishedError", "PeerLostError"]
__all__ += ["ProtocolError", "ResultsDifferError", "ShutDownError", "SystemRefusedError"]
__all__ += ["UnsupportedError"]
