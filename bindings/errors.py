"""The exceptions: a class for each kind of failure that the core knows.

As with Horovod, HorovodInternalError covers every failure between ranks, and ValueError wrong arguments. The
classes below distinguish failures that need different reactions: a mistake in the program (MismatchError) and
a lost peer (PeerLostError).
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Those that users meet; the other names are those of the bindings.
__all__ = ["AbortedError", "BatchSkippedError", "DeadlineError", "DeviceError", "ForkedError"]
__all__ += ["HorovodInternalError", "HostsUpdatedInterrupt", "InitializationError", "InternalError"]
__all__ += ["MismatchError", "NotFiniteError", "NotInitializedError", "OutOfMemoryError"]
__all__ += ["ParametersDifferError", "PeerFinishedError", "PeerLostError", "ProtocolError"]
__all__ += ["ResultsDifferError", "ShutDownError", "SystemRefusedError", "UnsupportedError"]

_PUBLIC_MODULE = "sirtaki.common.exceptions"  # shown in tracebacks and pickles: users import from there


class _Pickled(Exception):
    """Makes errors of several base classes loadable where tblib has changed how exceptions are pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args


class HorovodInternalError(_Pickled, RuntimeError):
    """An operation between the ranks failed."""


class InitializationError(HorovodInternalError):
    """The ranks could not form a world."""


class NotInitializedError(HorovodInternalError, ValueError):
    """init() has not been called in this process, or shutdown() has."""


class UnsupportedError(_Pickled, ValueError, NotImplementedError):
    """This build does not support such a dtype, layout or machine. Horovod raises a RuntimeError."""


class MismatchError(HorovodInternalError):
    """The ranks disagree about an operation. Only that operation fails; later operations work."""


class ParametersDifferError(ValueError):
    """The parameters or hyper-parameters of a model differ between ranks, although they must be equal."""


class PeerLostError(HorovodInternalError):
    """A rank died, or the connection to it broke. shutdown() and init() build a new world."""


class PeerFinishedError(PeerLostError):
    """A rank that is needed has already ended normally. Only that operation failed."""


class DeadlineError(HorovodInternalError, TimeoutError):
    """A rank did not do its part in time."""


class AbortedError(HorovodInternalError):
    """A rank aborted; the text is that rank's."""


class ShutDownError(HorovodInternalError):
    """The world was shut down before the operation ended."""


class OutOfMemoryError(HorovodInternalError, MemoryError):
    """Memory for a result or for the exchange could not be allocated."""


class ProtocolError(HorovodInternalError):
    """A peer sent malformed bytes."""


class SystemRefusedError(HorovodInternalError, OSError):
    """The operating system rejected a request."""


class ForkedError(HorovodInternalError):
    """The call came from a forked child; only the process that called init() can exchange data."""


class DeviceError(HorovodInternalError):
    """A GPU, or NCCL, failed; the text quotes CUDA or NCCL."""


class NotFiniteError(FloatingPointError):
    """A rank was about to add an infinity or a NaN to a sum over the ranks (setting non_finite=stop)."""


class ResultsDifferError(_Pickled, RuntimeError):
    """A rank computed other results from the same batch than before, or than other ranks (setting replay)."""


class BatchSkippedError(_Pickled, RuntimeError):
    """A rank ran out of memory: no rank uses this batch. `hvd.skip_if_out_of_memory` handles it."""


class InternalError(HorovodInternalError):
    """A bug in sirtaki itself."""


class HostsUpdatedInterrupt(RuntimeError):  # Horovod's name
    """The membership of an elastic job is about to change: this rank has to leave its world at this commit.

    `hvd.elastic.run` handles it. `skip_sync`: a hint that the state is equal on all ranks.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync

    def __str__(self) -> str:
        return "the ranks of this job are about to change"


for _kind in [item for item in vars().values() if isinstance(item, type) and issubclass(item, Exception)]:
    _kind.__module__ = _PUBLIC_MODULE


class Failure(NamedTuple):
    """The reason why a context is dead.

    Attributes:
        culprit: the rank that failed, was lost, or was late first.
        text: the error's text.
        kind: the name of its status, a key of `CLASSES`.
    """

    culprit: int
    text: str
    kind: str


# Keys are the names in the core's table of statuses.
CLASSES: dict[str, type[Exception]] = {
    "invalid_argument": ValueError,
    "unsupported": UnsupportedError,
    "mismatch": MismatchError,
    "peer_finished": PeerFinishedError,
    "peer_lost": PeerLostError,
    "timeout": DeadlineError,
    "aborted": AbortedError,
    "shut_down": ShutDownError,
    "out_of_memory": OutOfMemoryError,
    "protocol": ProtocolError,
    "system": SystemRefusedError,
    "forked": ForkedError,
    "internal": InternalError,
    "device": DeviceError,
    "not_finite": NotFiniteError,
}


def error_of(status: int, text: str) -> Exception:
    """Returns the exception for a status of the core's that is neither "ok" nor "in progress"."""
    name = status_name(status)
    return CLASSES.get(name, InternalError)(text or f"the core gave no text for its status {name!r}")


def status_name(status: int) -> str:
    """Returns the core's name of a status."""
    from sirtaki.bindings.library import statuses

    return next((kind.name for kind in statuses() if kind.code == status), "internal")
